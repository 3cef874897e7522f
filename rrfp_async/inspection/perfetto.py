"""A run as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing show.

A process per rank; on it a track of what held the device, a track of idle spans, and the transfers
as asynchronous slices. An arrow goes from the task that made a tensor to the one that used it.
"""

from collections.abc import Iterator
from typing import Any

from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.inspection.lines import TaskSpan, TransferSpan
from rrfp_async.inspection.run import RankStep, Run, is_backward
from rrfp_async.inspection.wording import idle_words

_DEVICE, _IDLE = 0, 1
_TRACKS = {_DEVICE: "device", _IDLE: "idle"}

Event = dict[str, Any]


def chrome_trace(run: Run) -> dict[str, Any]:
    """The run as the object that a trace file holds."""
    events = list(_names(run))
    for step in run.rank_steps():
        events += _tasks(step)
        events += _idles(step)
        events += _transfers(step)
        events += _flows(run, step)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _us(time_s: float) -> float:
    return round(time_s * 1e6, 3)


def _names(run: Run) -> Iterator[Event]:
    for rank in run.ranks:
        named = {"ph": "M", "pid": rank, "name": "process_name"}
        yield {**named, "args": {"name": f"rank {rank}"}}
        yield {**named, "name": "process_sort_index", "args": {"sort_index": rank}}
        for track, name in _TRACKS.items():
            yield {**named, "tid": track, "name": "thread_name", "args": {"name": name}}


def _tasks(step: RankStep) -> Iterator[Event]:
    decisions = {made.task: made for made in step.decisions}
    for task, span in step.spans.items():
        told: dict[str, Any] = {"step": step.step, "microbatch": task.microbatch}
        made = decisions.get(task)
        if made is not None:
            told |= {"reason": made.reason, "ready": made.ready, "waited_us": _us(made.waited_s)}
            told["passed_over"] = ", ".join(made.passed_over)
        yield {
            "ph": "X",
            "pid": step.rank,
            "tid": _DEVICE,
            "name": str(task),
            "cat": task.kind.value,
            "ts": _us(span.start_s),
            "dur": _us(span.duration_s),
            "args": told,
        }


def _idles(step: RankStep) -> Iterator[Event]:
    for idle in step.idles:
        yield {
            "ph": "X",
            "pid": step.rank,
            "tid": _IDLE,
            "name": idle.cause,
            "cat": "idle",
            "ts": _us(idle.start_s),
            "dur": _us(idle.duration_s),
            "args": {"why": idle_words(idle)},
        }


def _transfers(step: RankStep) -> Iterator[Event]:
    received = [span for spans in step.receives.values() for span in spans]
    for span in step.sends + received:
        way = "send" if span.sent else "receive"
        shared = {
            "pid": step.rank,
            "tid": _DEVICE,
            "cat": way,
            "name": f"{way} {span.task}",
            "id": f"{way} {step.step} {span.task} {span.edge} {step.rank}",
        }
        told = {"edge": str(span.edge), "peer": span.peer, "bytes": span.size_bytes}
        yield {**shared, "ph": "b", "ts": _us(span.start_s), "args": told}
        yield {**shared, "ph": "e", "ts": _us(span.end_s)}


def _flows(run: Run, step: RankStep) -> Iterator[Event]:
    for spans in step.receives.values():
        for received in spans:
            sender = run.rank_step(received.peer, step.step)
            made = sender.spans.get(received.task) if sender else None
            used = _used_by(step, received)
            if made is None or used is None:
                continue
            shared = {
                "cat": "flow",
                "name": "gradient" if is_backward(received.task.kind) else "activation",
                "id": f"{step.step} {received.task} {received.edge} {step.rank}",
                "tid": _DEVICE,
            }
            start_us = _us((made.start_s + made.end_s) / 2)  # inside the slice, so that it binds
            end_us = max(start_us, _us(used.start_s))
            yield {**shared, "ph": "s", "pid": received.peer, "ts": start_us}
            yield {**shared, "ph": "f", "bp": "e", "pid": step.rank, "ts": end_us}


def _used_by(step: RankStep, received: TransferSpan) -> TaskSpan | None:
    """The task that what was received was for."""
    microbatch, edge = received.task.microbatch, received.edge
    if received.task.kind is TaskKind.F:
        return step.spans.get(TaskId(edge.target, TaskKind.F, microbatch))
    if not is_backward(received.task.kind):
        return None
    kinds = (TaskKind.B, TaskKind.I)
    tasks = (TaskId(edge.source, kind, microbatch) for kind in kinds)
    return next((step.spans[task] for task in tasks if task in step.spans), None)

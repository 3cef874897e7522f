"""From the JSON object of a line to the typed line. Knows the names of fields, and no file."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from rrfp_async.ids import Edge, TaskId
from rrfp_async.inspection.lines import (
    Agreed,
    Dispatched,
    Failed,
    IdleSpan,
    Line,
    Lost,
    RunLine,
    StepBegan,
    StepEnded,
    TaskSpan,
    TransferSpan,
    Voided,
    Wait,
)

Fields = Mapping[str, Any]


def parse(fields: Fields, shift_s: float) -> Line | None:
    """The line whose JSON object is `fields`; None for an event that is not known here.

    Args:
        fields: The decoded object.
        shift_s: What is added to its times.

    Raises:
        KeyError: If a field is missing.
        TypeError: If one is of another type.
        ValueError: If one is out of its range, such as a task that is none.
    """
    parser = _PARSERS.get(fields["event"])
    return None if parser is None else parser(fields, shift_s)


@lru_cache(maxsize=1 << 17)
def task_of(word: str) -> TaskId:
    """The task of a word; a run says each many times."""
    return TaskId.parse(word)


def _maybe_task(word: str | None) -> TaskId | None:
    return None if word is None else task_of(word)


def _edge(pair: Any) -> Edge:
    source, target = pair
    return Edge(int(source), int(target))


def _run(fields: Fields, _shift_s: float) -> RunLine:
    error_s = fields.get("clock_error_s")
    return RunLine(
        rank=int(fields["rank"]),
        schema=int(fields["schema"]),
        world_size=int(fields["pp"]) * int(fields.get("dp", 1)) * int(fields.get("tp", 1)),
        stages=int(fields["stages"]),
        owned=tuple(map(int, fields["owned"])),
        hint=str(fields["hint"]),
        limit=fields["limit"],
        clock_offset_s=float(fields["clock_offset_s"]),
        clock_error_s=None if error_s is None else float(error_s),
        simulated=bool(fields["simulated"]),
        tp=int(fields.get("tp", 1)),
    )


def _step_begin(fields: Fields, shift_s: float) -> StepBegan:
    return StepBegan(int(fields["step"]), fields["time_s"] + shift_s, bool(fields["training"]))


def _step_end(fields: Fields, shift_s: float) -> StepEnded:
    loss = fields.get("loss")
    return StepEnded(
        step=int(fields["step"]),
        time_s=fields["time_s"] + shift_s,
        step_s=float(fields["step_s"]),
        compute_s=float(fields["compute_s"]),
        blocking_s=float(fields["blocking_s"]),
        coordination_s=float(fields["coordination_s"]),
        other_s=float(fields["other_s"]),
        loss=None if loss is None else float(loss),
        peak_in_flight=int(fields["peak_in_flight"]),
    )


def _dispatch(fields: Fields, shift_s: float) -> Dispatched:
    time_s = fields.get("time_s")
    return Dispatched(
        step=int(fields["step"]),
        task=_maybe_task(fields["task"]),
        time_s=None if time_s is None else time_s + shift_s,
        hint_position=fields["hint_position"],
        ready=int(fields["ready"]),
        passed_over=tuple(fields["passed_over"]),
        reason=str(fields["reason"]),
        waited_s=float(fields["waited_s"]),
    )


def _task(fields: Fields, shift_s: float) -> TaskSpan:
    start_s, end_s = fields["start_s"] + shift_s, fields["end_s"] + shift_s
    return TaskSpan(int(fields["step"]), task_of(fields["task"]), start_s, end_s)


def _transfer(fields: Fields, shift_s: float) -> TransferSpan:
    return TransferSpan(
        step=int(fields["step"]),
        task=task_of(fields["task"]),
        edge=_edge(fields["edge"]),
        sent=fields["direction"] == "send",
        peer=int(fields["peer"]),
        size_bytes=int(fields["bytes"]),
        packed=bool(fields["packed"]),
        start_s=fields["start_s"] + shift_s,
        end_s=fields["end_s"] + shift_s,
    )


def _wait(fields: Fields) -> Wait:
    edge, rank = fields.get("edge"), fields.get("rank")
    return Wait(
        task=task_of(fields["task"]),
        wanted=str(fields["for"]),
        edge=None if edge is None else _edge(edge),
        source=_maybe_task(fields.get("of")),
        rank=None if rank is None else int(rank),
    )


def _by_microbatch(task: TaskId) -> tuple[int, int]:
    return task.microbatch, task.stage


def _idle(fields: Fields, shift_s: float) -> IdleSpan:
    bound = fields.get("bound")
    return IdleSpan(
        step=int(fields["step"]),
        start_s=fields["start_s"] + shift_s,
        end_s=fields["end_s"] + shift_s,
        cause=str(fields["cause"]),
        ready=tuple(sorted(map(task_of, fields["ready"]), key=_by_microbatch)),
        in_flight=int(fields["in_flight"]),
        bound=None if bound is None else int(bound),
        waits=tuple(map(_wait, fields["waits"])),
    )


def _void(fields: Fields, _shift_s: float) -> Voided:
    return Voided(int(fields["step"]), task_of(fields["task"]))


def _tp(fields: Fields, _shift_s: float) -> Agreed:
    return Agreed(
        step=int(fields["step"]),
        number=int(fields["number"]),
        task=_maybe_task(fields["task"]),
        leader=fields["leader"],
        wait_s=float(fields["wait_s"]),
        retries=int(fields["retries"]),
    )


def _failure(fields: Fields, shift_s: float) -> Failed:
    rank = fields.get("rank")
    return Failed(
        step=int(fields["step"]),
        time_s=fields["time_s"] + shift_s,
        rank=None if rank is None else int(rank),
        task=_maybe_task(fields.get("task")),
        cause=str(fields["cause"]),
        report=str(fields.get("report") or ""),
    )


def _lost(fields: Fields, _shift_s: float) -> Lost:
    return Lost(int(fields["records"]))


_PARSERS: Mapping[str, Callable[[Fields, float], Line]] = {
    "run": _run,
    "step_begin": _step_begin,
    "step_end": _step_end,
    "dispatch": _dispatch,
    "task": _task,
    "transfer": _transfer,
    "idle": _idle,
    "void": _void,
    "tp": _tp,
    "failure": _failure,
    "lost": _lost,
}

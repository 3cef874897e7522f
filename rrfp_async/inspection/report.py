"""The numbers of a run: where the time of each rank went, what idled, what was slow."""

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass

from rrfp_async.ids import Edge, TaskId, TaskKind
from rrfp_async.inspection.failure import failure_words
from rrfp_async.inspection.lines import IdleSpan, TaskSpan, TransferSpan
from rrfp_async.inspection.run import RankStep, Run, is_backward

FAR = 1.5
"""So many times its median, and a task is far from it."""

_FAR_LEAST_S = 50e-6
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Row:
    """Where the time of one rank went in one step; None where that was not recorded.

    `bubble` is the share of the step in which the device held no task.
    """

    step: int
    rank: int
    step_s: float | None
    compute_s: float | None
    blocking_s: float | None
    coordination_s: float | None
    other_s: float | None
    bubble: float | None
    peak_in_flight: int | None
    loss: float | None
    decisions: int


@dataclass(frozen=True, slots=True)
class Idle:
    """An idle span and whose it was."""

    rank: int
    span: IdleSpan


@dataclass(frozen=True, slots=True)
class EdgeTimes:
    """How long what a task made took to be with the receiver, over all steps.

    Attributes:
        edge: The edge.
        gradient: Whether against it, as gradients go.
        source: The sending rank.
        target: The receiving rank.
        count: How many there were.
        size_bytes: The median size.
        median_s: From the end of the task that made it until it was there.
        worst_s: The longest of those.
        worst_step: The step of that.
        worst: The task that made that.
    """

    edge: Edge
    gradient: bool
    source: int
    target: int
    count: int
    size_bytes: float
    median_s: float
    worst_s: float
    worst_step: int
    worst: TaskId


@dataclass(frozen=True, slots=True)
class Outlier:
    """A task that took far longer than others of its stage and kind."""

    rank: int
    step: int
    task: TaskId
    duration_s: float
    median_s: float


@dataclass(frozen=True, slots=True)
class KindTimes:
    """How long the tasks of one kind take on one rank's stage."""

    rank: int
    stage: int
    kind: TaskKind
    count: int
    median_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """All of it, the worst first; `failure` says what failed, if anything did."""

    failure: str | None
    rows: tuple[Row, ...]
    idles: tuple[Idle, ...]
    edges: tuple[EdgeTimes, ...]
    outliers: tuple[Outlier, ...]
    kinds: tuple[KindTimes, ...]


def report(run: Run, *, step: int | None = None) -> Report:
    """The report of a run, or of one of its steps.

    Raises:
        ValueError: If no rank has recorded that step.
    """
    check_step(run, step)
    steps = list(run.rank_steps(step))
    kinds = kind_times(run)
    return Report(
        failure=failure_words(run, step=step),
        rows=tuple(map(_row, steps)),
        idles=tuple(_longest(steps)),
        edges=tuple(edge_times(run, step)),
        outliers=tuple(_far(steps, kinds)),
        kinds=tuple(kinds.values()),
    )


def check_step(run: Run, step: int | None) -> None:
    """Refuse a step that is not there.

    Raises:
        ValueError: If no rank has recorded it.
    """
    numbers = run.step_numbers()
    if step is not None and step not in numbers:
        known = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
        raise ValueError(f"step {step} is not in {run.folder}: it holds {known}")


def _row(step: RankStep) -> Row:
    end = step.ended
    shared = {"step": step.step, "rank": step.rank, "decisions": len(step.decisions)}
    if end is None:
        return Row(
            **shared,
            step_s=None,
            compute_s=None,
            blocking_s=None,
            coordination_s=None,
            other_s=None,
            bubble=None,
            peak_in_flight=None,
            loss=None,
        )
    return Row(
        **shared,
        step_s=end.step_s,
        compute_s=end.compute_s,
        blocking_s=end.blocking_s,
        coordination_s=end.coordination_s,
        other_s=end.other_s,
        bubble=1.0 - end.compute_s / end.step_s if end.step_s > 0 else 0.0,
        peak_in_flight=end.peak_in_flight,
        loss=end.loss if end.loss is None or math.isfinite(end.loss) else None,
    )


def _longest(steps: list[RankStep]) -> list[Idle]:
    found = [Idle(step.rank, idle) for step in steps for idle in step.idles]
    return sorted(found, key=lambda idle: -idle.span.duration_s)[:_SHOWN]


def kind_times(run: Run) -> dict[tuple[int, int, TaskKind], KindTimes]:
    """Median durations by rank, stage and kind, over all steps."""
    times: dict[tuple[int, int, TaskKind], list[float]] = defaultdict(list)
    for step in run.rank_steps():
        for task, span in step.spans.items():
            times[step.rank, task.stage, task.kind].append(span.duration_s)
    return {
        (rank, stage, kind): KindTimes(rank, stage, kind, len(held), statistics.median(held))
        for (rank, stage, kind), held in times.items()
    }


def is_far(span: TaskSpan, median_s: float) -> bool:
    """Whether a task took far longer than others of its kind."""
    return span.duration_s > FAR * median_s and span.duration_s - median_s > _FAR_LEAST_S


def _far(steps: list[RankStep], kinds: dict[tuple[int, int, TaskKind], KindTimes]) -> list[Outlier]:
    found = [
        Outlier(step.rank, step.step, task, span.duration_s, median_s)
        for step in steps
        for task, span in step.spans.items()
        for median_s in [kinds[step.rank, task.stage, task.kind].median_s]
        if is_far(span, median_s)
    ]
    return sorted(found, key=lambda task: task.median_s - task.duration_s)[:_SHOWN]


def latency_s(run: Run, received: TransferSpan) -> float:
    """From the end of the task that made it until it was there, its header's way included.

    Where the sender's file is missing, from the header's arrival.
    """
    sender = run.rank_step(received.peer, received.step)
    made = sender.spans.get(received.task) if sender else None
    return max(0.0, received.end_s - (made.end_s if made else received.start_s))


def edge_times(run: Run, step: int | None = None) -> list[EdgeTimes]:
    """Every edge in either direction, the slowest first."""
    seen: dict[tuple[Edge, bool, int, int], list[TransferSpan]] = defaultdict(list)
    for rank_step in run.rank_steps(step):
        for spans in rank_step.receives.values():
            for span in spans:
                gradient = is_backward(span.task.kind)
                if gradient or span.task.kind is TaskKind.F:
                    seen[span.edge, gradient, span.peer, rank_step.rank].append(span)
    found = [_edge_times(run, key, spans) for key, spans in seen.items()]
    return sorted(found, key=lambda edge: -edge.median_s)


def _edge_times(run: Run, way: tuple[Edge, bool, int, int], spans: list[TransferSpan]) -> EdgeTimes:
    edge, gradient, source, target = way
    times = [latency_s(run, span) for span in spans]
    worst_s, worst = max(zip(times, spans, strict=True), key=lambda pair: pair[0])
    return EdgeTimes(
        edge=edge,
        gradient=gradient,
        source=source,
        target=target,
        count=len(spans),
        size_bytes=statistics.median(span.size_bytes for span in spans),
        median_s=statistics.median(times),
        worst_s=worst_s,
        worst_step=worst.step,
        worst=worst.task,
    )

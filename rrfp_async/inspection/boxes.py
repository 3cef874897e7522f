"""What a timeline shows of a step: a box per task and per idle span. Draws nothing."""

from dataclasses import dataclass

from rrfp_async.ids import TaskKind
from rrfp_async.inspection.report import check_step
from rrfp_async.inspection.run import RankStep, Run
from rrfp_async.inspection.wording import idle_words, moment, names, seconds

COLOURS = {
    TaskKind.F: "#6baed6",
    TaskKind.B: "#74c476",
    TaskKind.I: "#41ab9b",
    TaskKind.W: "#fdae6b",
    TaskKind.R: "#bcbddc",
}
"""The fill of each kind of task, light enough for black numbers."""

MEANING = {
    TaskKind.F: "F forward",
    TaskKind.B: "B backward",
    TaskKind.I: "I input gradient",
    TaskKind.W: "W weight gradient",
    TaskKind.R: "R reduction",
}
"""The legend."""


@dataclass(frozen=True, slots=True)
class TaskBox:
    """A task on the picture: when it ran, in words, and the reason of its choice."""

    rank: int
    kind: TaskKind
    name: str
    label: str
    start_s: float
    end_s: float
    when: str
    reason: str


@dataclass(frozen=True, slots=True)
class IdleBox:
    """An idle span on the picture."""

    rank: int
    start_s: float
    end_s: float
    when: str
    reason: str


@dataclass(frozen=True, slots=True)
class Picture:
    """One step, ready to be drawn.

    Attributes:
        title: What it is of.
        ranks: The ranks, from above.
        tasks: What held the devices.
        idles: When they had nothing to do.
    """

    title: str
    ranks: tuple[int, ...]
    tasks: tuple[TaskBox, ...]
    idles: tuple[IdleBox, ...]


def picture(run: Run, step: int | None = None) -> Picture:
    """The picture of a step, by default the last that every rank has ended.

    Raises:
        ValueError: If the step is not there, or has no times.
    """
    check_step(run, step)
    number = run.last_step() if step is None else step
    steps = list(run.rank_steps(number))
    tasks = tuple(box for rank_step in steps for box in _tasks(run, rank_step))
    if not tasks:
        raise ValueError(
            f"step {number} of {run.folder} has no task with a time: record again with this "
            f"version, or choose another --step"
        )
    idles = tuple(box for rank_step in steps for box in _idles(rank_step))
    hint = f", hint {run.heads[0].hint}" if run.heads else ""
    clock = ", simulated" if run.simulated else ""
    title = f"Step {number}{hint}{clock}"
    return Picture(title, tuple(run.ranks), tasks, idles)


def _tasks(run: Run, step: RankStep) -> list[TaskBox]:
    decisions = {made.task: made for made in step.decisions}
    head = run.ranks[step.rank].head
    chunks = head.owned if head is not None else ()
    boxes = []
    for task, span in step.spans.items():
        made = decisions.get(task)
        reason = "no decision was recorded"
        if made is not None:
            over = f"; before {names(list(made.passed_over))}" if made.passed_over else ""
            reason = f"{made.reason} ({made.ready} ready{over})"
        chunk = f"{chr(ord('a') + chunks.index(task.stage) % 26)}" if len(chunks) > 1 else ""
        when = f"{moment(span.start_s)} to {moment(span.end_s)}, {seconds(span.duration_s)}"
        label = f"{task.microbatch}{chunk}"
        boxes.append(
            TaskBox(step.rank, task.kind, str(task), label, span.start_s, span.end_s, when, reason)
        )
    return boxes


def _idles(step: RankStep) -> list[IdleBox]:
    return [
        IdleBox(
            step.rank,
            idle.start_s,
            idle.end_s,
            f"{moment(idle.start_s)} to {moment(idle.end_s)}, {seconds(idle.duration_s)}",
            idle_words(idle),
        )
        for idle in step.idles
    ]

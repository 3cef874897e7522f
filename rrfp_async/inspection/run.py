"""A recorded run: its ranks, their steps, and how to find what belongs to a task.

Built by `reading`. Times are seconds since the first step began, on the clock of rank 0.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from rrfp_async.ids import TaskId, TaskKind
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
)


@dataclass(slots=True)
class RankStep:
    """One step of one rank.

    Attributes:
        rank: The rank.
        step: The step's number.
        began: When it began, if that was recorded.
        ended: Its sums, if it ended.
        decisions: What was dispatched, in order.
        spans: What held the device, by task.
        sends: What left, in order.
        receives: What came, by the task that made it.
        idles: When the device had nothing to do, in order.
        voids: The backwards that were not needed.
        agreements: Decisions of its tensor-parallel group.
    """

    rank: int
    step: int
    began: StepBegan | None = None
    ended: StepEnded | None = None
    decisions: list[Dispatched] = field(default_factory=list)
    spans: dict[TaskId, TaskSpan] = field(default_factory=dict)
    sends: list[TransferSpan] = field(default_factory=list)
    receives: dict[TaskId, list[TransferSpan]] = field(default_factory=lambda: defaultdict(list))
    idles: list[IdleSpan] = field(default_factory=list)
    voids: list[TaskId] = field(default_factory=list)
    agreements: list[Agreed] = field(default_factory=list)

    def add(self, line: Line) -> None:
        """Take a line of this step."""
        match line:
            case StepBegan():
                self.began = line
            case StepEnded():
                self.ended = line
            case Dispatched():
                self.decisions.append(line)
            case TaskSpan():
                self.spans[line.task] = line
            case TransferSpan(sent=True):
                self.sends.append(line)
            case TransferSpan():
                self.receives[line.task].append(line)
            case IdleSpan():
                self.idles.append(line)
            case Voided():
                self.voids.append(line.task)
            case Agreed():
                self.agreements.append(line)

    def in_order(self) -> list[TaskSpan]:
        """What held the device, by time."""
        return sorted(self.spans.values(), key=lambda span: span.start_s)

    def decision(self, task: TaskId) -> Dispatched | None:
        """The decision that dispatched `task`."""
        return next((made for made in self.decisions if made.task == task), None)

    def idle_at(self, time_s: float) -> IdleSpan | None:
        """The idle span that holds the moment."""
        at = bisect.bisect_right(self.idles, time_s, key=lambda idle: idle.start_s) - 1
        return self.idles[at] if at >= 0 and time_s <= self.idles[at].end_s else None

    def span_at(self, time_s: float) -> TaskSpan | None:
        """What held the device at the moment."""
        held = (span for span in self.spans.values() if span.start_s <= time_s <= span.end_s)
        return next(held, None)

    def extent_s(self) -> tuple[float, float] | None:
        """From when to when anything is known of it; None if nothing is."""
        times = [time for span in self.spans.values() for time in (span.start_s, span.end_s)]
        times += [time for idle in self.idles for time in (idle.start_s, idle.end_s)]
        times += [edge.time_s for edge in (self.began, self.ended) if edge is not None]
        return (min(times), max(times)) if times else None


@dataclass(slots=True)
class RankTrace:
    """What one rank has recorded.

    Attributes:
        rank: The rank.
        head: Its first line; None where that is missing, as in records of schema 1.
        steps: By number.
        failure: How its run failed.
        lost: Records that never reached the file.
    """

    rank: int
    head: RunLine | None = None
    steps: dict[int, RankStep] = field(default_factory=dict)
    failure: Failed | None = None
    lost: int = 0

    def add(self, line: Line) -> None:
        """Take the next line."""
        if isinstance(line, RunLine):
            self.head = line
        elif isinstance(line, Lost):
            self.lost += line.records
        elif isinstance(line, Failed):
            self.failure = line
        else:
            if line.step not in self.steps:
                self.steps[line.step] = RankStep(self.rank, line.step)
            self.steps[line.step].add(line)


@dataclass(frozen=True, slots=True)
class Run:
    """All that a folder holds.

    Attributes:
        folder: Its name.
        ranks: What each rank recorded, by rank.
        problems: What could not be read, each as a sentence.
    """

    folder: str
    ranks: dict[int, RankTrace]
    problems: tuple[str, ...] = ()

    @property
    def heads(self) -> list[RunLine]:
        """The first lines that there are."""
        return [trace.head for trace in self.ranks.values() if trace.head is not None]

    @property
    def simulated(self) -> bool:
        """Whether its times are virtual."""
        return any(head.simulated for head in self.heads)

    @property
    def timed(self) -> bool:
        """Whether anything in it has a time."""
        return any(rank_step.extent_s() for rank_step in self.rank_steps())

    def step_numbers(self) -> list[int]:
        """The steps that some rank has recorded."""
        return sorted({number for trace in self.ranks.values() for number in trace.steps})

    def rank_steps(self, step: int | None = None) -> Iterator[RankStep]:
        """Every rank's record of a step, by rank; of every step in turn for None."""
        for number in self.step_numbers() if step is None else [step]:
            for trace in self.ranks.values():
                if number in trace.steps:
                    yield trace.steps[number]

    def last_step(self) -> int:
        """The last step that every rank has ended, or if none has, the last recorded."""
        ended = [
            {number for number, step in trace.steps.items() if step.ended is not None}
            for trace in self.ranks.values()
        ]
        common = set.intersection(*ended) if ended else set()
        return max(common or self.step_numbers())

    def rank_step(self, rank: int, step: int) -> RankStep | None:
        """A rank's record of a step, if there is one."""
        trace = self.ranks.get(rank)
        return None if trace is None else trace.steps.get(step)

    def group_of(self, rank: int) -> list[int]:
        """The ranks that compute the stages of `rank` together with it, itself among them."""
        tp = max((head.tp for head in self.heads), default=1)
        first = rank - rank % tp
        return list(range(first, first + tp))

    def ranks_of(self, stage: int) -> list[int]:
        """The ranks that own a stage: one, or several with replicas."""
        return [head.rank for head in self.heads if stage in head.owned]


def is_backward(kind: TaskKind) -> bool:
    """Whether a task of the kind waits for, and passes on, gradients."""
    return kind in (TaskKind.B, TaskKind.I)

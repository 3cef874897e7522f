"""What a step's spans tell: peak activations, and what the runtime added to its own decisions.

The same for every system, from when its stages' tasks ran. It does not know which system ran.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.emulation import Span

RankSpans = Sequence[Sequence[Span]]
"""The spans of one step by rank, each rank's in order of time."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The same tasks in the same order on every rank, with nothing else taking time.

    Attributes:
        makespan_s: What that takes.
        path_tasks: How many tasks lie on the path that decides it; of equal paths, the longest.
    """

    makespan_s: float
    path_tasks: int


def peak_activations(spans: RankSpans, chunks: int) -> float:
    """The most microbatches in flight on a rank, in whole-rank stages: from F until its W is done.

    Args:
        spans: Of one step.
        chunks: Stages of a rank; an activation of one of them counts that part.
    """
    peak = 0
    for of_rank in spans:
        changes = [(span.begun_s, 1) for span in of_rank if span.kind == "F"]
        changes += [(span.ended_s, -1) for span in of_rank if span.kind == "W"]
        held = 0
        for _, change in sorted(changes):
            held += change
            peak = max(peak, held)
    return peak / chunks


def task_gaps_s(spans: RankSpans, *, split: bool, stages: int) -> list[float]:
    """How long after all it needed was done each task began; the first of all tasks apart."""
    ended = {_key(span): span.ended_s for of_rank in spans for span in of_rank}
    gaps = []
    for of_rank in spans:
        before_s = None
        for span in of_rank:
            needed = [ended[key] for key in _needs(span, stages, split=split)]
            if before_s is not None:
                needed.append(before_s)
            follows = not split and span.kind == "W"  # the second half of a B
            if needed and not follows:
                gaps.append(span.begun_s - max(needed))
            before_s = span.ended_s
    return gaps


def replayed(spans: RankSpans, *, split: bool, stages: int) -> Replay:
    """The step again, every rank's tasks in the same order, at no cost but what they took."""
    queues = [list(of_rank) for of_rank in spans]
    done: dict[tuple[str, int, int], tuple[float, int]] = {}
    reached: defaultdict[int, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    heads = [0] * len(queues)
    remaining = sum(map(len, queues))
    while remaining:
        before = remaining
        for rank, queue in enumerate(queues):
            while heads[rank] < len(queue):
                span = queue[heads[rank]]
                needs = _needs(span, stages, split=split)
                if any(key not in done for key in needs):
                    break
                time_s, tasks = max([reached[rank], *(done[key] for key in needs)])
                own = 0 if not split and span.kind == "W" else 1
                end = (time_s + span.ended_s - span.begun_s, tasks + own)
                done[_key(span)] = reached[rank] = end
                heads[rank] += 1
                remaining -= 1
        if remaining == before:
            raise RuntimeError("the spans' order does not fit their dependencies")
    makespan_s, path_tasks = max(reached.values())
    return Replay(makespan_s, path_tasks)


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that `percent` of the values do not pass."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _key(span: Span) -> tuple[str, int, int]:
    return span.kind, span.stage, span.microbatch


def _needs(span: Span, stages: int, *, split: bool) -> list[tuple[str, int, int]]:
    """The spans that must have ended before this one may begin, its rank's last one apart."""
    kind, stage, microbatch = _key(span)
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    if kind == "W":
        return [("I", stage, microbatch)]
    needs = [("F", stage, microbatch)]
    if stage + 1 < stages:  # a whole backward sends when its W is done too
        needs.append(("I" if split else "W", stage + 1, microbatch))
    return needs

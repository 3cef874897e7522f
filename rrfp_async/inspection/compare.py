"""Two runs beside each other: medians over their steps, and what changed most."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from rrfp_async.inspection.report import edge_times, kind_times, report
from rrfp_async.inspection.run import Run

PARTS = ("step_s", "compute_s", "blocking_s", "coordination_s", "other_s")


@dataclass(frozen=True, slots=True)
class Change:
    """One number in both runs; None where one of them has it not.

    Attributes:
        what: What it is of: a rank's part of its time, tasks of a stage, an edge.
        before: In the first run, in seconds.
        after: In the second.
    """

    what: str
    before: float | None
    after: float | None

    @property
    def difference_s(self) -> float:
        """Second minus first; 0 where one is missing."""
        if self.before is None or self.after is None:
            return 0.0
        return self.after - self.before

    @property
    def is_none(self) -> bool:
        """Whether both runs have it and it is one number, within a thousandth or a microsecond."""
        if self.before is None or self.after is None:
            return False
        return math.isclose(self.before, self.after, rel_tol=1e-3, abs_tol=1e-6)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs, the largest changes first within each part but the first.

    Attributes:
        sums: The step as a whole: its length, and means over the ranks.
        ranks: Each rank's parts of its time.
        tasks: Median durations by stage and kind.
        edges: Median ways by edge and direction.
    """

    sums: tuple[Change, ...]
    ranks: tuple[Change, ...]
    tasks: tuple[Change, ...]
    edges: tuple[Change, ...]


def compare(first: Run, second: Run) -> Comparison:
    """Compare two runs, of whatever size each."""
    return Comparison(
        sums=tuple(_changes(_sums(first), _sums(second))),
        ranks=tuple(_largest(_parts(first), _parts(second))),
        tasks=tuple(_largest(_tasks(first), _tasks(second))),
        edges=tuple(_largest(_edges(first), _edges(second))),
    )


def _changes(first: dict[str, float], second: dict[str, float]) -> list[Change]:
    return [
        Change(what, first.get(what), second.get(what)) for what in dict.fromkeys([*first, *second])
    ]


def _largest(first: dict[str, float], second: dict[str, float]) -> list[Change]:
    return sorted(_changes(first, second), key=lambda change: -abs(change.difference_s))


def _parts(run: Run) -> dict[str, float]:
    rows = [row for row in report(run).rows if row.step_s is not None]
    times: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for part in PARTS:
            times[f"rank {row.rank} {part}"].append(getattr(row, part))
    return {what: statistics.median(seen) for what, seen in times.items()}


def _sums(run: Run) -> dict[str, float]:
    """The longest rank's step, and the mean over ranks of each other part: medians over steps."""
    steps: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in report(run).rows:
        if row.step_s is not None:
            for part in PARTS:
                steps[row.step][part].append(getattr(row, part))
    if not steps:
        return {}
    found = {"step_s (longest rank)": _over(steps.values(), "step_s", max)}
    for part in PARTS[1:]:
        found[f"{part} (mean of ranks)"] = _over(steps.values(), part, statistics.fmean)
    return found


def _over(
    steps: Iterable[dict[str, list[float]]], part: str, of_ranks: Callable[[list[float]], float]
) -> float:
    return statistics.median(of_ranks(step[part]) for step in steps)


def _tasks(run: Run) -> dict[str, float]:
    found = {
        (times.stage, times.kind.value): f"{times.kind.value} of stage {times.stage}"
        for times in kind_times(run).values()
    }
    medians: dict[Hashable, list[float]] = defaultdict(list)
    for times in kind_times(run).values():
        medians[times.stage, times.kind.value].append(times.median_s)
    return {name: statistics.median(medians[key]) for key, name in found.items()}


def _edges(run: Run) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for edge in edge_times(run):
        found[f"{'gradient' if edge.gradient else 'activation'} {edge.edge}"].append(edge.median_s)
    return {name: statistics.median(times) for name, times in found.items()}

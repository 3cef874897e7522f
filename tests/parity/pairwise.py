"""Rows that between them hold every pair of values which rules let stand in one row.

A row has one value on each axis. Far fewer rows hold all pairs than there are rows: about as many
as the two longest axes have pairs. The choice is greedy and draws nothing, so it is the same
everywhere. What an axis means is not known here.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Axes = Mapping[str, Sequence[Any]]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


@dataclass(frozen=True)
class Rule:
    """What a row must fulfil.

    Attributes:
        axes: Those it is about.
        holds: Told their values, in that order.
    """

    axes: tuple[str, ...]
    holds: Callable[..., bool]

    def allows(self, row: Row) -> bool:
        """Whether `row` fulfils it, or may yet: not all of the rule's axes are in it."""
        return any(axis not in row for axis in self.axes) or self.holds(
            *(row[axis] for axis in self.axes)
        )


def pairs_of(row: Row, axes: Axes) -> list[Pair]:
    """The pairs of values in a row, those of earlier axes first."""
    return list(combinations(((axis, row[axis]) for axis in axes if axis in row), 2))


def possible_pairs(axes: Axes, rules: Sequence[Rule]) -> list[Pair]:
    """Every pair that some whole row holds, in the order of the axes."""
    return [
        ((a, left), (b, right))
        for a, b in combinations(axes, 2)
        for left, right in product(axes[a], axes[b])
        if can_be_completed({a: left, b: right}, axes, rules)
    ]


def can_be_completed(row: Row, axes: Axes, rules: Sequence[Rule]) -> bool:
    """Whether the rules leave some value for each axis that `row` has not."""
    if not all(rule.allows(row) for rule in rules):
        return False
    ruled = {axis for rule in rules for axis in rule.axes}
    missing = next((axis for axis in axes if axis in ruled and axis not in row), None)
    return missing is None or any(
        can_be_completed({**row, missing: value}, axes, rules) for value in axes[missing]
    )


def every_pair(axes: Axes, rules: Sequence[Rule] = ()) -> list[Row]:
    """Rows that fulfil the rules and hold every possible pair.

    Each begins with the first pair that none before holds, and takes on every other axis the value
    that brings most pairs more; of equal ones that whose pairs are the rarest so far.
    """
    missing = dict.fromkeys(possible_pairs(axes, rules))
    held: Counter[Pair] = Counter()
    rows: list[Row] = []
    while missing:
        (a, left), (b, right) = next(iter(missing))
        row = {a: left, b: right}
        for axis in sorted(axes, key=lambda axis: -len(axes[axis])):
            if axis not in row:
                row[axis] = _best(axis, row, held, axes, rules)
        rows.append({axis: row[axis] for axis in axes})
        for pair in pairs_of(rows[-1], axes):
            held[pair] += 1
            missing.pop(pair, None)
    return rows


def _best(axis: str, row: Row, held: Counter[Pair], axes: Axes, rules: Sequence[Rule]) -> Any:
    """The value for `axis` beside what `row` has."""

    def worth(value: Any) -> tuple[int, int]:
        times = [held[pair] for pair in pairs_of({**row, axis: value}, axes)]
        return times.count(0), -sum(times)

    fitting = (v for v in axes[axis] if can_be_completed({**row, axis: v}, axes, rules))
    return max(fitting, key=worth)


def every_value(rows: Sequence[Row]) -> list[Row]:
    """A few of `rows` that between them hold every value which `rows` have."""
    wanted = {value for row in rows for value in row.items()}
    chosen = []
    while wanted:
        chosen.append(max(rows, key=lambda row: len(wanted & row.items())))
        wanted -= chosen[-1].items()
    return chosen


def rows_with(row: Row, axes: Axes, rules: Sequence[Rule]) -> Iterator[Row]:
    """All rows that hold `row`, over the axes that rules are about: tried one by one."""
    ruled = [axis for axis in axes if any(axis in rule.axes for rule in rules)]
    values = ([row[axis]] if axis in row else axes[axis] for axis in ruled)
    for combination in product(*values):
        whole = {**row, **dict(zip(ruled, combination, strict=True))}
        if all(rule.allows(whole) for rule in rules):
            yield whole

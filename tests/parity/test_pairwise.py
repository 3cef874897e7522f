"""The rows are those that they are said to be: every pair of values that can be is there."""

from itertools import combinations, product

import pytest

import rrfp_async as r
from tests.parity.axes import AXES, LAW, PLACED, RULES, matrix, sample
from tests.parity.cases import LISTED
from tests.parity.pairwise import Axes, Rule, every_pair, pairs_of, possible_pairs, rows_with

LEAST_ROWS = 60


def test_every_pair_that_can_be_is_in_the_matrix() -> None:
    """Each pair of values of two axes is in a row, unless every row with it breaks a rule."""
    held = {pair for row in matrix().values() for pair in pairs_of(row, AXES)}
    for a, b in combinations(AXES, 2):
        for left, right in product(AXES[a], AXES[b]):
            if ((a, left), (b, right)) not in held:
                assert not list(rows_with({a: left, b: right}, AXES, RULES)), (a, left, b, right)


def test_no_row_breaks_a_rule() -> None:
    """And each has one value on every axis."""
    for row in matrix().values():
        assert list(row) == list(AXES)
        assert all(row[axis] in values for axis, values in AXES.items())
        assert all(rule.allows(row) for rule in RULES)


def test_there_are_enough_rows_and_none_twice() -> None:
    """As many as were asked for."""
    rows = list(matrix().values())
    assert len(rows) >= LEAST_ROWS
    assert all(a != b for a, b in combinations(rows, 2))


def test_the_sample_holds_every_value() -> None:
    """A small part of the matrix that `make test` runs."""
    rows = [row for name, row in matrix().items() if name in sample()]
    assert len(rows) < len(matrix()) / 4
    for axis, values in AXES.items():
        assert {row[axis] for row in rows} == set(values)


def test_the_hints_that_the_rules_leave_out_are_those_that_are_refused() -> None:
    """A list is taken for a pipeline exactly where the rules say it is made for it."""
    for hint, placement, count in product(AXES["hint"], AXES["placement"], AXES["microbatches"]):
        ranks, chunks, where = PLACED[placement]
        topology = r.Topology(ranks, chunks=chunks, placement=where or LISTED)
        binding = True if hint.endswith(LAW) else None
        config = r.Config(microbatches=count, hint=hint.removesuffix(LAW), binding=binding)
        row = {"hint": hint, "placement": placement, "microbatches": count}
        if all(rule.allows(row) for rule in RULES):
            config.check_order(topology)
        else:
            with pytest.raises(ValueError, match=r"needs|multiple"):
                config.check_order(topology)


SMALL: Axes = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (1, 2), "d": (1, 2)}


def test_pairs_take_fewer_rows_than_the_product() -> None:
    """Four small axes: at least nine rows, far from 36."""
    rows = every_pair(SMALL)
    assert {pair for row in rows for pair in pairs_of(row, SMALL)} == set(possible_pairs(SMALL, ()))
    assert 9 <= len(rows) <= 12


def test_a_pair_that_rules_forbid_together_is_no_possible_one() -> None:
    """a=1 wants b=1, b=1 wants c=1: so no row has a=1 and c=2, though no rule names both."""
    rules = (
        Rule(("a", "b"), lambda a, b: a != 1 or b == 1),
        Rule(("b", "c"), lambda b, c: b != 1 or c == 1),
    )
    possible = possible_pairs(SMALL, rules)
    assert (("a", 1), ("c", 2)) not in possible
    assert (("a", 1), ("c", 1)) in possible
    rows = every_pair(SMALL, rules)
    assert {pair for row in rows for pair in pairs_of(row, SMALL)} == set(possible)


def test_the_choice_is_the_same_every_time() -> None:
    """So that a row's name means the same everywhere."""
    assert every_pair(AXES, RULES) == list(matrix().values())

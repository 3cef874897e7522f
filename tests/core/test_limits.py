"""Limits: a number, or one that follows from depth, position and what was measured."""

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_async.backpressure import Backpressure
from rrfp_async.ids import Edge
from rrfp_async.limits import AutoLimit, FixedLimit, Limit, make_limit
from rrfp_async.topology import Topology
from tests.core.words import tasks

SAMPLES = 4
"""Tasks and transfers, of each as many, that a step must show before they count."""

RATIOS = st.floats(0.0, 1e6)
TIMES = st.floats(1e-9, 1e3)


def formula(stages: int, ratio: float) -> int:
    """`ceil(a * (1 + min(1, 0.5 + r)) + 8 * min(1, 4 r))`, docs/backpressure.md's bound."""
    return math.ceil(stages * (1.0 + min(1.0, 0.5 + ratio)) + 8.0 * min(1.0, 4.0 * ratio))


def measure(limit: Limit, ratio: float, *, samples: int = SAMPLES, task_s: float = 1.0) -> None:
    """Tasks of `task_s` and transfers `ratio` times as long, in turn."""
    for _ in range(samples):
        limit.measured(task_s=task_s)
        limit.measured(transfer_s=ratio * task_s)


# -- a number --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 4, 1000])
def test_a_number_stays_what_it_is(number: int) -> None:
    """Nothing that is measured moves it, in this step or the next."""
    limit = FixedLimit(number)
    for _ in range(2):
        limit.begin_step()
        assert not limit.measured(task_s=1.0)
        assert not limit.measured(transfer_s=100.0)
        assert limit.value == number
        assert limit.for_peak(number) == limit.for_peak(1) == number


@pytest.mark.parametrize(("number", "peak"), [(1, 2), (3, 4), (3, 64)])
def test_a_number_below_the_peak_of_a_binding_order_is_refused(number: int, peak: int) -> None:
    """The error names limit and peak, the rule and both remedies."""
    with pytest.raises(ValueError, match=f"limit={number} is below {peak}, ") as caught:
        FixedLimit(number).for_peak(peak)
    assert "in flight" in str(caught.value)
    assert f"give limit='auto', or {peak} or more" in str(caught.value)


# -- automatic -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "value"), [(1, 2), (2, 3), (3, 5), (4, 6), (16, 24), (33, 50), (1024, 1536)]
)
def test_before_anything_is_measured_it_covers_the_way_and_half_as_much_again(
    stages: int, value: int
) -> None:
    """Stages from here to the end, this one included; never below them."""
    assert AutoLimit(stages).value == value == formula(stages, 0.0)


@pytest.mark.parametrize(
    ("ratio", "value"),
    [
        *((0.0, 6), (0.01, 7), (0.125, 11), (0.24, 15), (0.25, 15)),
        *((0.26, 16), (0.5, 16), (0.75, 16), (1e9, 16)),
    ],
)
def test_slow_transfers_raise_it_to_twice_the_way_and_eight(ratio: float, value: int) -> None:
    """Four stages to the end: the eight are full at a quarter of a task's time, the way at half."""
    limit = AutoLimit(4)
    measure(limit, ratio)
    assert limit.value == value == formula(4, ratio)


@given(st.integers(1, 2000), st.lists(RATIOS, max_size=8))
def test_it_lies_between_one_and_a_half_ways_and_two_and_eight_more(
    stages: int, ratios: list[float]
) -> None:
    """Whatever is measured, step after step; so the peak is at most 2 * stages + 8."""
    limit = AutoLimit(stages)
    for ratio in ratios:
        limit.begin_step()
        measure(limit, ratio)
        assert 1.5 * stages <= limit.value <= 8 + 2 * stages


@given(st.integers(1, 200), st.lists(RATIOS, max_size=4), st.integers(0, 300))
def test_what_the_bound_adds_is_taken_off_but_one_place_stays(
    stages: int, ratios: list[float], beyond: int
) -> None:
    """So with chunks the bound is the formula's, as without, or one more than there are chunks."""
    plain, less = AutoLimit(stages), AutoLimit(stages, beyond=beyond)
    for ratio in ratios:
        for limit in (plain, less):
            limit.begin_step()
            measure(limit, ratio)
        assert less.value == max(1, plain.value - beyond)


def test_a_binding_order_is_given_its_own_peak() -> None:
    """Below the automatic value or above it."""
    limit = AutoLimit(4)
    assert [limit.for_peak(peak) for peak in (1, 4, 64)] == [1, 4, 64]


def test_a_few_samples_do_not_count() -> None:
    """Of tasks and of transfers, as many as of the other: the first ones are no measure."""
    limit = AutoLimit(4)
    measure(limit, 10.0, samples=SAMPLES - 1)
    assert limit.value == 6
    for _ in range(100):
        assert not limit.measured(task_s=1.0)
    assert limit.value == 6
    assert limit.measured(transfer_s=10.0)
    assert limit.value == 16


def test_what_took_no_time_is_no_sample() -> None:
    """A transfer on the rank itself, or a task that was not timed, does not thin the average."""
    limit = AutoLimit(4)
    for _ in range(100):
        assert not limit.measured()
        assert not limit.measured(task_s=0.0, transfer_s=0.0)
        assert not limit.measured(transfer_s=5.0)
    assert limit.value == 6
    measure(limit, 0.2)
    assert limit.value == 16


def test_within_a_step_it_rises_and_never_falls() -> None:
    """A slow transfer counts at once; quick ones that follow count from the next step on."""
    limit = AutoLimit(4)
    measure(limit, 0.1)
    assert limit.value == formula(4, 0.1) == 10
    measure(limit, 1.1)
    assert limit.value == 16
    measure(limit, 0.0001, samples=1000)
    assert limit.value == 16
    limit.begin_step()
    assert limit.value == formula(4, 0.01) == 7


def test_a_step_starts_from_the_average_of_the_last() -> None:
    """And not from its largest, nor from that of the one before."""
    limit = AutoLimit(100)
    for ratio in (0.4, 0.1, 0.3, 0.0):
        limit.begin_step()
        measure(limit, ratio)
        limit.begin_step()
        assert limit.value == formula(100, ratio if ratio else 0.3)


def test_a_step_with_too_few_samples_leaves_what_was_known() -> None:
    """Short steps and empty ones: the last measure stands."""
    limit = AutoLimit(100)
    measure(limit, 0.4)
    for samples in (0, 1, SAMPLES - 1):
        limit.begin_step()
        measure(limit, 0.01, samples=samples)
    limit.begin_step()
    assert limit.value == formula(100, 0.4)


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=40), st.integers(1, 64))
def test_it_tells_when_it_may_have_risen(times: list[tuple[float, float]], stages: int) -> None:
    """It moves only on a measurement that says so, and never down, whatever the times."""
    limit = AutoLimit(stages)
    limit.begin_step()
    for task_s, transfer_s in times:
        before = limit.value
        rose = limit.measured(task_s=task_s, transfer_s=transfer_s)
        assert limit.value >= before
        assert rose or limit.value == before


def test_the_units_do_not_matter() -> None:
    """Only the ratio counts: microseconds or minutes."""
    for task_s in (1e-7, 1.0, 600.0):
        limit = AutoLimit(100)
        measure(limit, 0.25, task_s=task_s)
        assert limit.value == formula(100, 0.25)


# -- of a rank -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_a_rank_counts_the_stages_to_the_end_from_its_own(ranks: int) -> None:
    """The first has the whole chain before it, the last only itself."""
    for rank in range(ranks):
        limit = make_limit("auto", Topology(ranks), rank)
        assert isinstance(limit, AutoLimit)
        assert limit.value == formula(ranks - rank, 0.0)


def test_on_a_graph_the_longest_way_to_the_end_counts() -> None:
    """Two encoders of different lengths that join: 0 -> 1 -> 3 -> 4, and 2 -> 3, 0 -> 4."""
    graph = Topology(5, (Edge(0, 1), Edge(1, 3), Edge(2, 3), Edge(3, 4), Edge(0, 4)))
    values = [make_limit("auto", graph, rank).value for rank in range(5)]
    assert values == [formula(stages, 0.0) for stages in (4, 3, 3, 2, 1)]


@pytest.mark.parametrize("limit", [1, 7])
def test_a_number_is_the_limit_of_every_rank(limit: int | Literal["auto"]) -> None:
    """Whatever its position."""
    assert [make_limit(limit, Topology(4), rank).value for rank in range(4)] == [limit] * 4


@pytest.mark.parametrize(("ranks", "chunks"), [(1, 1), (4, 1), (1, 2), (4, 2), (4, 3), (2, 8)])
def test_where_backwards_are_split_the_way_is_the_depth_on_every_rank(
    ranks: int, chunks: int
) -> None:
    """Later ranks put off as much W as early ones; the bound is the formula's for any chunks."""
    topology = Topology(ranks, chunks=chunks)
    for rank in range(ranks):
        limit = make_limit("auto", topology, rank, split=True)
        assert bound_of(limit, chunks) == max(formula(ranks * chunks, 0.0), least_bound(chunks))


@pytest.mark.parametrize("placement", ["loop", "v"])
def test_with_several_chunks_the_way_is_the_depth_on_every_rank(placement: str) -> None:
    """Every rank has early stages and late ones."""
    topology = Topology(3, chunks=2, placement=placement)
    for rank in range(3):
        limit = make_limit("auto", topology, rank)
        for ratio in (0.0, 0.1, 9.0):
            measure(limit, ratio)
            limit.begin_step()
            assert bound_of(limit, 2) == formula(6, ratio)


def bound_of(limit: Limit, chunks: int) -> int:
    """The bound that backpressure makes of the limit."""
    backpressure = Backpressure(limit, chunks=chunks)
    backpressure.begin_step(64, backward=True)
    return backpressure.bound


def least_bound(chunks: int) -> int:
    """A limit of 1 with as many places as are kept."""
    return 1 if chunks == 1 else 1 + chunks


# -- in use ----------------------------------------------------------------------------------------


def begun(stages: int = 4, *, chunks: int = 1, fixed_peak: int | None = None) -> Backpressure:
    """Backpressure under an automatic limit, in a training step."""
    backpressure = Backpressure(AutoLimit(stages), chunks=chunks)
    backpressure.begin_step(64, backward=True, fixed_peak=fixed_peak)
    return backpressure


def report(backpressure: Backpressure, ratio: float, *, samples: int = SAMPLES) -> None:
    """Tell of tasks of a second and transfers `ratio` times as long."""
    for _ in range(samples):
        backpressure.measured(task_s=1.0)
        backpressure.measured(transfer_s=ratio)


def test_the_bound_rises_with_the_limit_within_a_step_and_falls_only_between_steps() -> None:
    """Forwards in flight never exceed it: it does not move under them."""
    backpressure = begun()
    bounds = [backpressure.bound]
    for ratio in (0.0, 0.2, 2.0, 0.0, 0.0):
        report(backpressure, ratio, samples=20)
        bounds.append(backpressure.bound)
    assert bounds == [6, 6, 14, 16, 16, 16]
    backpressure.begin_step(64, backward=True)
    assert backpressure.bound == 16
    report(backpressure, 0.01, samples=20)
    assert backpressure.bound == 16
    backpressure.begin_step(64, backward=True)
    assert backpressure.bound == formula(4, 0.01) == 7


@given(st.lists(st.tuples(TIMES, TIMES), max_size=40), st.integers(1, 16), st.integers(1, 3))
def test_the_bound_only_rises(times: list[tuple[float, float]], stages: int, chunks: int) -> None:
    """Whatever is measured, it is at least the limit and at most twice the way and eight more."""
    backpressure = begun(stages, chunks=chunks)
    extra = 0 if chunks == 1 else chunks
    for task_s, transfer_s in times:
        before = backpressure.bound
        backpressure.measured(task_s=task_s)
        backpressure.measured(transfer_s=transfer_s)
        assert before <= backpressure.bound <= 8 + 2 * stages + extra


def test_places_that_were_added_are_given_out_at_once() -> None:
    """A rank at its bound goes on as soon as transfers turn out slow: also the last rank."""
    for stages, before, after in ((1, 2, 10), (4, 6, 16)):
        backpressure = begun(stages)
        for each in tasks(" ".join(f"0F{index}" for index in range(before))):
            assert backpressure.admissible()(each)
            backpressure.decided(each)
        assert backpressure.in_flight == backpressure.bound == before
        assert not backpressure.admissible()(tasks(f"0F{before}")[0])
        report(backpressure, 5.0)
        assert backpressure.bound == after
        assert backpressure.admissible()(tasks("0F40")[0])


def test_a_binding_order_keeps_its_peak_whatever_is_measured() -> None:
    """Its bound is its own; what is measured meanwhile does not move it."""
    backpressure = begun(fixed_peak=3)
    assert backpressure.bound == 3
    report(backpressure, 9.0, samples=50)
    assert backpressure.bound == 3


def test_a_number_as_bound_does_not_move() -> None:
    """Nor does it with chunks, each of which adds a place."""
    for chunks, bound in [(1, 5), (2, 7), (4, 9)]:
        backpressure = Backpressure(FixedLimit(5), chunks=chunks)
        backpressure.begin_step(8, backward=True)
        report(backpressure, 9.0)
        assert backpressure.bound == bound


def test_a_budget_is_nothing_to_an_evaluation() -> None:
    """It retains nothing, measured or not: the other limit bounds its open sends."""
    limit = make_limit(6, Topology(3), 0, budget_bytes=100)
    backpressure = Backpressure(limit)
    for known in (None, 50):
        if known is not None:
            limit.measured(kept_bytes=known)
        backpressure.begin_step(8, backward=False)
        assert backpressure.bound == 6
        backpressure.begin_step(8, backward=True)
        assert backpressure.bound == (1 if known is None else 2)

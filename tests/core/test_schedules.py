"""Listed orders: what is generated, how a list ranks, and what it means to execute it."""

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_async.arbiter import Arbiter, Decision, Reason
from rrfp_async.backpressure import Backpressure
from rrfp_async.config import Config
from rrfp_async.hints import (
    Admissible,
    Execution,
    HintOrder,
    Schedule,
    make_order,
    resolve_hint,
)
from rrfp_async.ids import Edge, TaskId, TaskKind
from rrfp_async.limits import FixedLimit
from rrfp_async.topology import Topology
from tests.core.fixed_order import Core, Cores, Written, tasks_of
from tests.core.strategies import GRAPHS, SEEDS, Graph
from tests.core.words import task, tasks, words

ANY = Admissible(any_forward=True)
NONE = Admissible(any_forward=False)
RANKING = Execution(binding=False, deterministic=True)
BINDING = Execution(binding=True, deterministic=True)
SHAPES = [(ranks, count) for ranks in (1, 2, 3, 5, 8) for count in (1, 2, 4, 7, 16)]
JOINED = Topology(4, (Edge(0, 2), Edge(1, 2), Edge(2, 3)))


def generated(name: str, topology: Topology, microbatches: int) -> list[list[TaskId]]:
    """The lists of a schedule that has a name."""
    schedule = resolve_hint(name)
    assert isinstance(schedule, Schedule)
    return [list(row) for row in schedule.orders(topology, microbatches, 0)]


def step_of(rank: int, microbatches: int, kinds: str = "FB") -> list[TaskId]:
    """The tasks of a step on a rank, as the ready set lists them."""
    ids = [TaskId(rank, TaskKind(kind), index) for index in range(microbatches) for kind in kinds]
    return sorted(ids, key=lambda each: each.microbatch)


def begun(
    schedule: Schedule, execution: Execution = RANKING, *, microbatches: int = 2, rank: int = 0
) -> HintOrder:
    """The order of a rank of two in a training step, nothing ready."""
    order = make_order(schedule, Topology(2), rank, execution)
    order.begin_step(step_of(rank, microbatches))
    return order


def refused(schedule: Schedule | str, **settings: Any) -> str:
    """The message that two ranks with two microbatches refuse the schedule with."""
    config = Config(**{"microbatches": 2, "hint": schedule, **settings})
    with pytest.raises(ValueError, match=r".") as caught:
        config.check_order(Topology(2))
    return str(caught.value)


# -- generated -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "rows"),
    [
        ("gpipe", 1, 1, ["0F0 0B0"]),
        ("gpipe", 2, 3, ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]),
        ("1f1b", 1, 3, ["0F0 0B0 0F1 0B1 0F2 0B2"]),
        ("1f1b", 2, 1, ["0F0 0B0", "1F0 1B0"]),
        (
            "1f1b",
            3,
            4,
            [
                "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
                "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
                "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
            ],
        ),
        (
            "1f1b",
            4,
            2,
            ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1", "3F0 3B0 3F1 3B1"],
        ),
    ],
)
def test_a_published_schedule_is_the_one_in_its_paper(
    name: str, ranks: int, microbatches: int, rows: list[str]
) -> None:
    """Written out for small pipelines, fewer microbatches than stages included."""
    assert [words(row) for row in generated(name, Topology(ranks), microbatches)] == rows


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_a_backward_stands_behind_as_many_forwards_as_its_schedule_says(
    name: str, ranks: int, microbatches: int
) -> None:
    """1F1B: one for each stage from here to the end, and one for each backward before; GPipe: all.

    Each direction runs in microbatch order, so with these counts the lists are the definition.
    """
    for rank, row in enumerate(generated(name, Topology(ranks), microbatches)):
        backwards = [place for place, each in enumerate(row) if each.kind is TaskKind.B]
        for index, place in enumerate(backwards):
            most = microbatches if name == "gpipe" else min(microbatches, ranks - rank + index)
            assert row[place] == TaskId(rank, TaskKind.B, index)
            assert place - index == most, f"{words(row)}: {row[place]}"
        forwards = [each for each in row if each.kind is TaskKind.F]
        assert forwards == [TaskId(rank, TaskKind.F, index) for index in range(microbatches)]


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_the_peak_is_the_depth_for_1f1b_and_every_microbatch_for_gpipe(
    ranks: int, microbatches: int
) -> None:
    """Counted from the lists, as the checks see them and as the rank is bound by them."""
    for name in ("gpipe", "1f1b"):
        for rank in range(ranks):
            order = make_order(resolve_hint(name), Topology(ranks), rank, BINDING)
            order.begin_step(step_of(rank, microbatches))
            depth = ranks - rank if name == "1f1b" else microbatches
            assert order.fixed_peak == min(microbatches, depth)


def test_encoders_that_join_fill_the_pipeline_by_their_own_way_to_the_end() -> None:
    """On a graph the stages that follow are those of the longest way."""
    rows = [words(row) for row in generated("1f1b", JOINED, 3)]
    assert rows[0] == "0F0 0F1 0F2 0B0 0B1 0B2"
    assert rows[1] == "1F0 1F1 1F2 1B0 1B1 1B2"
    assert rows[2] == "2F0 2F1 2B0 2F2 2B1 2B2"
    assert rows[3] == "3F0 3B0 3F1 3B1 3F2 3B2"


# -- a list that ranks -----------------------------------------------------------------------------


def test_a_list_ranks_what_is_ready_and_never_waits() -> None:
    """Lower entries run while higher ones are not ready; positions are those of the list."""
    order = begun(Written("0F1 0B1 0F0 0B0", "1F0 1F1 1B0 1B1"))
    assert [order.position(each) for each in tasks("0F1 0B1 0F0 0B0")] == [0, 1, 2, 3]
    order.add(task("0B0"))
    assert order.peek(NONE) == task("0B0")
    order.add(task("0F0"))
    assert order.peek(ANY) == task("0F0")
    assert order.peek(NONE) == task("0B0")
    order.add(task("0F1"))
    assert order.peek(Admissible(any_forward=False, forward_microbatch=0)) == task("0F0")
    assert order.peek(ANY) == task("0F1")
    assert order.fixed_peak is None


def test_what_a_list_passes_over_is_what_stands_higher_and_is_still_to_come() -> None:
    """At most as many as asked for, in the list's order; what was dispatched is not among them."""
    order = begun(Written("0F1 0B1 0F0 0B0", "1F0 1F1 1B0 1B1"))
    assert words(order.ahead_of(task("0B0"), 8)) == "0F1 0B1 0F0"
    assert words(order.ahead_of(None, 2)) == "0F1 0B1"
    order.add(task("0F1"))
    order.commit(task("0F1"))
    assert words(order.ahead_of(None, 8)) == "0B1 0F0 0B0"
    assert order.ahead_of(task("0B1"), 8) == []
    assert order.position(task("0F0")) == 2


def test_the_tasks_that_a_list_lacks_rank_last() -> None:
    """Where a schedule may be incomplete, what is listed comes first, and nothing is left out."""
    order = begun(Written("0B1 0F1", "", complete=False))
    assert words(order.ahead_of(None, 2)) == "0B1 0F1"
    assert set(order.ahead_of(None, 8)[2:]) == set(tasks("0F0 0B0"))
    assert order.position(task("0F0")) in {2, 3}
    for each in tasks("0F0 0B0 0F1"):
        order.add(each)
    assert order.peek(ANY) == task("0F1")
    assert make_order(Written("", ""), Topology(2), 0, RANKING).fixed_peak is None


def test_the_tasks_that_a_list_lacks_rank_by_one_rule_on_every_rank() -> None:
    """Nothing but stage, kind and microbatch decides: ranks and runs agree on what comes last."""
    schedule = Written("", "", complete=False)
    ranked = [begun(schedule, microbatches=6, rank=rank).ahead_of(None, 99) for rank in range(2)]
    without_stage = [words(TaskId(0, each.kind, each.microbatch) for each in row) for row in ranked]
    assert without_stage[0] == without_stage[1]


def test_a_complete_schedule_that_lacks_a_task_is_refused_also_as_a_ranking() -> None:
    """Missing tasks rank last only in schedules that say so; none does when it is executed."""
    rows = ("0F0 0F1 0B1", "1F0 1F1 1B0 1B1")
    assert "rank 0: task 0B0 is missing" in refused(Written(*rows))
    partial = Written(*rows, complete=False)
    Config(microbatches=2, hint=partial).check_order(Topology(2))
    assert "rank 0: task 0B0 is missing" in refused(partial, binding=True)


@pytest.mark.parametrize("binding", [False, True])
@pytest.mark.parametrize(
    ("unknown", "rule"),
    [
        (task("1F0"), "rank 0 owns the stages [0]"),
        (task("7F0"), "rank 0 owns the stages [0]"),
        (task("0F2"), "the step has the microbatches 0 to 1"),
        (task("0B4"), "the step has the microbatches 0 to 1"),
        (task("0R0"), "the stage has tasks of the kinds F, B"),
        (task("0F1"), "a second time"),
        (TaskId(0, TaskKind.F, -1), "the step has the microbatches 0 to 1"),
    ],
)
def test_an_unknown_task_in_a_list_is_refused(unknown: TaskId, rule: str, binding: bool) -> None:
    """Ranking or executed: the error names row, entry, task and rule."""
    row = [*tasks("0F0 0F1 0B0 0B1"), unknown]
    message = refused(Written(row, "1F0 1F1 1B0 1B1", complete=False), binding=binding)
    assert message.startswith(f"written, rank 0, entry 4: task {unknown}, but ")
    assert rule in message


def test_a_schedule_with_a_list_too_many_or_too_few_is_refused() -> None:
    """One list for each rank: the error has both counts."""
    for rows in (["0F0 0F1 0B0 0B1"], ["", "", ""], []):
        message = refused(Written(*rows, complete=False))
        assert f"{len(rows)} lists for 2 ranks: give one row for each rank" in message


# -- a list that binds -----------------------------------------------------------------------------


def arbiter_of(schedule: Schedule, *, limit: int = 8) -> tuple[Arbiter, Backpressure]:
    """Rank 0 of two that executes its list as it stands, in a step of two microbatches."""
    backpressure = Backpressure(FixedLimit(limit))
    arbiter = Arbiter(make_order(schedule, Topology(2), 0, BINDING), backpressure)
    arbiter.begin_step(step_of(0, 2))
    return arbiter, backpressure


def test_a_binding_list_runs_nothing_but_its_head() -> None:
    """Others may be ready: the rank waits, and says for which task and why."""
    arbiter, _ = arbiter_of(Written("0F1 0F0 0B0 0B1", "1F0 1F1 1B0 1B1"))
    assert arbiter.choose().reason is Reason.NOTHING_READY
    arbiter.add(tasks("0F0 0B0"))
    waiting = Decision(None, None, 2, (task("0F1"),), Reason.FIXED_ORDER)
    assert arbiter.choose() == waiting == arbiter.choose()
    arbiter.add(tasks("0F1"))
    assert arbiter.choose() == Decision(task("0F1"), 0, 3, (), Reason.FIRST)
    arbiter.commit(arbiter.choose())
    arbiter.commit(arbiter.choose())
    assert arbiter.choose() == Decision(task("0B0"), 2, 1, (), Reason.FIRST)
    arbiter.commit(arbiter.choose())
    assert arbiter.choose() == Decision(None, None, 0, (), Reason.NOTHING_READY)


def test_a_binding_list_keeps_no_place_for_the_oldest_microbatch() -> None:
    """Peak and limit are 1 and microbatch 1 goes first, which a ranking would have to hold back."""
    rows = ("0F1 0B1 0F0 0B0", "1F1 1B1 1F0 1B0")
    config = Config(microbatches=2, hint=Written(*rows), binding=True, deterministic=False, limit=1)
    cores = Cores(config, Topology(2))
    assert [words(row) for row in tasks_of(cores.run_step())] == list(rows)
    assert cores.peaks == [1, 1]


@given(
    GRAPHS,
    st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    st.integers(1, 12),
    st.sampled_from(["auto", 24, 99]),
    SEEDS,
)
def test_a_binding_list_is_executed_as_it_stands_up_to_exactly_its_own_peak(
    graph: Graph, name: str, microbatches: int, limit: Any, seed: int
) -> None:
    """On every graph, whatever overtakes; a limit above the peak changes nothing."""
    stages, edges = graph
    topology = Topology(stages, tuple(Edge(*pair) for pair in edges))
    config = Config(microbatches=microbatches, hint=name, binding=True, limit=limit)
    cores = Cores(config, topology, seed=seed)
    assert tasks_of(cores.run_step()) == generated(name, topology, microbatches)
    held = {TaskKind.F: 1, TaskKind.I: 0, TaskKind.W: -1, TaskKind.B: -1}
    peaks = [
        max(accumulate(held[each.kind] for each in row))
        for row in generated(name, topology, microbatches)
    ]
    assert cores.peaks == peaks


@pytest.mark.parametrize(("name", "peak"), [("gpipe", 8), ("1f1b", 4)])
def test_an_explicit_limit_below_the_peak_is_refused_and_auto_takes_it(
    name: str, peak: int
) -> None:
    """The error names limit, peak and both remedies, before a step; a ranking takes any limit."""
    settings: dict[str, Any] = {"microbatches": 8, "hint": name}
    for limit in (1, peak - 1):
        with pytest.raises(ValueError, match=rf"limit={limit} is below {peak}") as caught:
            Config(**settings, binding=True, limit=limit).check_order(Topology(4))
        assert f"give limit='auto', or {peak} or more" in str(caught.value)
        Config(**settings, limit=limit).check_order(Topology(4))
    for enough in ("auto", peak, peak + 1):
        cores = Cores(Config(**settings, binding=True, limit=enough), Topology(4))
        cores.run_step()
        assert max(cores.peaks) == peak


# -- steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("binding", [False, True])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_steps_of_different_sizes_and_modes_follow_one_another(name: str, binding: bool) -> None:
    """A generated list is made for each step; an evaluation runs its forwards alone."""
    cores = Cores(Config(microbatches=3, hint=name, binding=binding), Topology(3), seed=1)
    for count, training in [(3, True), (7, True), (7, False), (1, True), (2, False), (5, True)]:
        rows = generated(name, Topology(3), count)
        if not training:
            rows = [[each for each in row if each.kind is TaskKind.F] for row in rows]
        decided = cores.run_step(count, training=training)
        for row, dispatched, rank in zip(rows, tasks_of(decided), decided, strict=True):
            assert dispatched == row if binding else set(dispatched) == set(row)
            assert [each.hint_position for each in rank] == [row.index(t) for t in dispatched]


@pytest.mark.parametrize("limit", [4, 5])
def test_an_evaluation_fits_a_limit_that_training_fits(limit: int) -> None:
    """Nothing is retained in it, so a limit of the list's own peak is no reason to refuse it."""
    config = Config(microbatches=8, hint="1f1b", binding=True, limit=limit)
    cores = Cores(config, Topology(4), seed=2)
    cores.run_step()
    cores.run_step(training=False)
    assert cores.peaks == [0, 0, 0, 0]
    assert [core.backpressure.bound for core in cores.ranks] == [limit] * 4


def test_the_open_sends_of_an_evaluation_are_bounded_however_many_microbatches() -> None:
    """With `auto` as well: the bound follows from the pipeline, not from the size of the step."""
    bounds = []
    for count in (8, 64):
        core = Core(Config(microbatches=count, hint="1f1b", binding=True), Topology(4), 0)
        core.begin_step(count, training=False)
        bounds.append(core.backpressure.bound)
    assert bounds[0] == bounds[1]


def test_a_head_that_is_ready_but_held_back_waits_for_room() -> None:
    """In an evaluation at the bound of open sends the reason is backpressure, not the order."""
    core = Core(Config(microbatches=2, hint="gpipe", binding=True), Topology(2), 0)
    core.begin_step(2, training=False)
    core.arbiter.commit(core.arbiter.choose())
    for _ in range(core.backpressure.bound):
        core.backpressure.send_opened()
    held = core.arbiter.choose()
    assert (held.task, held.ready) == (None, 1)
    assert held.reason is Reason.BACKPRESSURE


def test_a_list_for_another_number_of_microbatches_is_refused_in_the_step() -> None:
    """A schedule written for two cannot run three; it can run two again."""
    order = begun(Written("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"))
    with pytest.raises(ValueError, match=r"rank 0: task 0F2 is missing"):
        order.begin_step(step_of(0, 3))
    with pytest.raises(ValueError, match=r"entry 1: task 0F1, but .* 0 to 0"):
        order.begin_step(step_of(0, 1))
    order.begin_step(step_of(0, 2))
    assert words(order.ahead_of(None, 8)) == "0F0 0F1 0B0 0B1"


# -- shared ----------------------------------------------------------------------------------------


def test_ranks_at_different_steps_share_one_schedule() -> None:
    """What one asks for in between does not disturb another's list or peak."""
    shared = resolve_hint("1f1b")
    topology = Topology(3)
    orders = [make_order(shared, topology, rank, BINDING) for rank in range(2)]
    orders[0].begin_step(step_of(0, 8))
    orders[1].begin_step(step_of(1, 1, "F"))
    orders[1].begin_step(step_of(1, 2))
    orders[0].add(task("0F0"))
    assert orders[0].peek(ANY) == task("0F0")
    assert [order.fixed_peak for order in orders] == [3, 2]
    assert words(orders[0].ahead_of(None, 8)) == "0F0"
    orders[0].begin_step(step_of(0, 2))
    assert orders[0].fixed_peak == 2


def test_one_schedule_serves_two_pipelines_and_two_configs() -> None:
    """Each gets lists for its own depth, and each its own rules, in whatever turn."""
    shared = resolve_hint("1f1b")
    ranking = Config(microbatches=6, hint=shared)
    binding = Config(microbatches=6, hint=shared, binding=True)
    assert ranking.order is binding.order
    for _ in range(2):
        two, five = Cores(binding, Topology(2)), Cores(binding, Topology(5))
        assert tasks_of(five.run_step()) == generated("1f1b", Topology(5), 6)
        assert tasks_of(two.run_step()) == generated("1f1b", Topology(2), 6)
        assert (two.peaks, five.peaks) == ([2, 1], [5, 4, 3, 2, 1])
        Cores(ranking, Topology(2)).run_step()

"""What a list must fulfil to be executed as it stands: no circular wait, gradients in order."""

import random
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_async.config import Config
from rrfp_async.hints import Execution, RankedHint, Schedule, make_order, resolve_hint
from rrfp_async.ids import Edge, TaskId, TaskKind
from rrfp_async.topology import Topology
from tests.core.fixed_order import Cores, Written, tasks_of
from tests.core.strategies import GRAPHS, SEEDS, Graph
from tests.core.words import tasks, words

ENDLESS = "the lists wait for each other for ever; list every task after those it depends on"


class Oldest(RankedHint):
    """A rule, not a list."""

    def rank(self, task: TaskId) -> int:
        return task.microbatch


def config_of(rows: Sequence[Any], **settings: Any) -> Config:
    """Two microbatches by the lists `rows`, executed as they stand."""
    return Config(**{"microbatches": 2, "hint": Written(*rows), "binding": True, **settings})


def refused(rows: Sequence[str], **settings: Any) -> str:
    """The message that the lists are refused with, one rank for each."""
    with pytest.raises(ValueError, match=r".") as caught:
        config_of(rows, **settings).check_order(Topology(len(rows)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("row", "entry", "waits"),
    [
        ("0B0 0F0 0F1 0B1", 0, "0B0 waits for 0F0"),
        ("0F0 0B0 0B1 0F1", 2, "0B1 waits for 0F1"),
    ],
)
def test_a_row_that_waits_for_its_own_later_task_is_refused(
    row: str, entry: int, waits: str
) -> None:
    """The error names the row, the entry where it stands still and what stands behind it."""
    message = refused([row])
    assert f"written, rank 0, entry {entry}: {waits}, which the same row lists after it" in message
    assert ENDLESS in message


def test_a_row_that_waits_for_itself_is_named_alone_though_others_wait_for_it() -> None:
    """The first rank is only held up; the fault is the second's."""
    message = refused(["0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1"])
    assert message.startswith("written, rank 1, entry 0: 1B0 waits for 1F0, which the same row")
    assert "rank 0" not in message


def test_rows_that_wait_for_each_other_are_refused_with_both_ends() -> None:
    """Rank 0 wants the gradient before it gives the activation that rank 1 wants before that."""
    message = refused(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])
    assert "written, rank 0, entry 1: 0B0 waits for 1B0" in message
    assert "written, rank 1, entry 1: 1F1 waits for 0F1" in message
    assert ENDLESS in message


def test_the_rows_of_a_circle_are_told_and_not_those_that_wait_for_it() -> None:
    """Ranks 0 and 1 wait for each other; then ranks 1 and 2 do, and rank 0 for them."""
    rows = ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1"]
    message = refused(rows)
    for rank, waits in enumerate(["0B0 waits for 1B0", "1F1 waits for 0F1"]):
        assert f"rank {rank}, entry 1: {waits}" in message
    assert "rank 2" not in message
    rows[1] = "1F0 1B0 1F1 1B1"
    message = refused(rows)
    for rank, waits in ((1, "1B0 waits for 2B0"), (2, "2F1 waits for 1F1")):
        assert f"written, rank {rank}, entry 1: {waits}" in message
    assert "rank 0" not in message


def test_the_same_lists_are_taken_as_a_ranking() -> None:
    """Nobody waits for a list that only ranks."""
    rows = ["0B0 0B1 0F1 0F0", "1B1 1F1 1F0 1B0"]
    cores = Cores(config_of(rows, binding=False, limit=1), Topology(2), seed=5)
    assert [set(row) for row in tasks_of(cores.run_step())] == [
        set(row) for row in tasks_of(cores.run_step())
    ]


@given(GRAPHS, st.integers(1, 5), st.integers(0, 6), SEEDS)
def test_lists_are_refused_exactly_where_they_and_the_dependencies_form_a_circle(
    graph: Graph, microbatches: int, swaps: int, seed: int
) -> None:
    """Judged by a topological sort; what is taken runs to its end, whatever overtakes."""
    stages, edges = graph
    topology = Topology(stages, tuple(Edge(*pair) for pair in edges))
    rows = swapped(topology, microbatches, swaps, seed)
    config = config_of(rows, microbatches=microbatches, deterministic=False)
    if has_circle(rows, edges):
        with pytest.raises(ValueError, match="wait for"):
            config.check_order(topology)
    else:
        cores = Cores(config, topology, seed=seed)
        assert tasks_of(cores.run_step()) == rows


def swapped(topology: Topology, microbatches: int, swaps: int, seed: int) -> list[list[TaskId]]:
    """1F1B with some pairs of tasks of one rank exchanged."""
    schedule = resolve_hint("1f1b")
    assert isinstance(schedule, Schedule)
    rows = [list(row) for row in schedule.orders(topology, microbatches, 0)]
    drawn = random.Random(seed)
    for _ in range(swaps):
        row = drawn.choice(rows)
        one, other = drawn.randrange(len(row)), drawn.randrange(len(row))
        row[one], row[other] = row[other], row[one]
    return rows


def has_circle(rows: list[list[TaskId]], edges: Sequence[tuple[int, int]]) -> bool:
    """Whether a task waits for itself, by its row and by what it depends on."""
    sorter: TopologicalSorter[TaskId] = TopologicalSorter()
    for row in rows:
        for before, after in pairwise(row):
            sorter.add(after, before)
        for each in row:
            if each.kind is TaskKind.B:
                sorter.add(each, TaskId(each.stage, TaskKind.F, each.microbatch))
            for source, target in edges:
                if each.kind is TaskKind.F and target == each.stage:
                    sorter.add(each, TaskId(source, TaskKind.F, each.microbatch))
                if each.kind is TaskKind.B and source == each.stage:
                    sorter.add(each, TaskId(target, TaskKind.B, each.microbatch))
    try:
        sorter.prepare()
    except CycleError:
        return True
    return False


# -- the order of accumulation ---------------------------------------------------------------------

REVERSED = ["0F0 0F1 0F2 0B2 0B1 0B0", "1F0 1F1 1F2 1B2 1B1 1B0"]


def test_backwards_out_of_order_are_refused_where_accumulation_is_deterministic() -> None:
    """The error names row, the first pair, the rule and both remedies."""
    message = refused(REVERSED, microbatches=3)
    assert message.startswith("written, rank 0: 0B2 stands before 0B1, but ")
    assert "accumulated in microbatch order" in message
    assert "list them in that order, or set deterministic=False" in message
    late = refused(["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B2 1B1"], microbatches=3)
    assert late.startswith("written, rank 1: 1B2 stands before 1B1, but ")


def test_backwards_out_of_order_are_executed_where_accumulation_is_free() -> None:
    """As they stand, in a whole pipeline."""
    config = config_of(REVERSED, microbatches=3, deterministic=False)
    cores = Cores(config, Topology(2), seed=3)
    assert [words(row) for row in tasks_of(cores.run_step())] == REVERSED


def test_backwards_out_of_order_may_rank_also_where_accumulation_is_deterministic() -> None:
    """Then it is readiness that is in order: the list cannot ask for what is not ready."""
    cores = Cores(config_of(REVERSED, microbatches=3, binding=False), Topology(2), seed=4)
    for row in tasks_of(cores.run_step()):
        backwards = [each.microbatch for each in row if each.kind is TaskKind.B]
        assert backwards == [0, 1, 2]


def test_of_a_split_backward_only_the_weights_need_their_order() -> None:
    """I may come in any order; W accumulates, and the error names its first pair."""
    rows = ["0F0 0F1 0I1 0I0 0W0 0W1", "1F0 1F1 1I1 1I0 1W0 1W1"]
    splitting = Written(*rows)
    splitting.splits = True
    cores = Cores(config_of([], hint=splitting), Topology(2), seed=5)
    assert [words(row) for row in tasks_of(cores.run_step())] == rows
    message = refused([rows[0], "1F0 1F1 1I0 1I1 1W1 1W0"])
    assert message.startswith("written, rank 1: 1W1 stands before 1W0, but ")


def test_a_stage_that_cannot_split_does_not_wait_for_ever_where_its_list_reverses_i() -> None:
    """B stands where I is listed and accumulates there: out of order it must be refused."""
    execution = Execution(binding=True, deterministic=True)
    order = make_order(Written("0F0 0F1 0I1 0I0 0W0 0W1"), Topology(1), 0, execution)
    with pytest.raises(ValueError, match="0B1 stands before 0B0"):
        order.begin_step(tasks("0F0 0B0 0F1 0B1"))


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hint", ["bf", "fb", "b-priority", "f-priority", Oldest()])
def test_a_rule_cannot_bind(hint: Any) -> None:
    """The error names the hint, what can bind, and the other way out."""
    with pytest.raises(ValueError, match="binding=True executes a list") as caught:
        Config(microbatches=2, hint=hint, binding=True)
    message = str(caught.value)
    assert f"hint {hint if isinstance(hint, str) else 'Oldest'!r} is a rule" in message
    assert "one of the lists that" in message
    assert "leave binding out" in message
    for lax in (False, None):
        assert not Config(microbatches=2, hint=hint, binding=lax).execution.binding


@pytest.mark.parametrize("binding", [0, 1, "yes", "1f1b"])
def test_binding_is_a_switch_or_left_out(binding: Any) -> None:
    """A truthy word is not True."""
    with pytest.raises(ValueError, match="binding") as caught:
        Config(microbatches=2, hint="1f1b", binding=binding)
    assert str(caught.value) == f"binding={binding!r} must be True, False or None"


def test_ranks_that_bind_and_ranks_that_do_not_can_tell() -> None:
    """The word is what is done, not what was given: leaving it out is the same as False here."""
    ranking, explicit, bound = (
        dict(Config(microbatches=2, hint="1f1b", binding=binding).agreed())
        for binding in (None, False, True)
    )
    assert ranking == explicit
    assert {name for name in bound if bound[name] != ranking[name]} == {"binding"}
    assert (ranking["hint"], bound["binding"]) == ("1f1b", "True")


def test_a_schedule_object_goes_by_its_name() -> None:
    """A name and the object that it stands for agree."""
    one = Config(microbatches=2, hint=resolve_hint("gpipe"))
    assert one.hint_name == "gpipe"
    assert one.agreed() == Config(microbatches=2, hint="gpipe").agreed()
    assert config_of(["", ""]).hint_name == "written"

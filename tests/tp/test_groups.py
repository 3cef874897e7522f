"""HAZARD 16, searched: whatever takes how long, a group runs one order, within its limit."""

import itertools
import random
from typing import Any

import pytest

from rrfp_async.clocks import Alignment, SharedClock
from rrfp_async.config import TP_PROTOCOLS, Config
from rrfp_async.grid import tp_group
from rrfp_async.ids import TaskKind
from rrfp_async.topology import Topology
from rrfp_async.tp.agreement import OwnChoice
from tests.tp.groups import DifferentCollectives, Groups, Times

RULES = ("bf", "fb", "bfw", "b-priority", "f-priority")
LISTS = ("1f1b", "zb-h1", "gpipe")
"""For one stage a rank."""
SHAPES: tuple[dict[str, Any], ...] = (
    {"pp": 2, "tp": 2},
    {"pp": 4, "tp": 2},
    {"pp": 3, "tp": 3},
    {"pp": 2, "tp": 4},
    {"pp": 1, "tp": 2},
    {"pp": 2, "tp": 2, "dp": 2},
    {"pp": 2, "tp": 2, "chunks": 2},
    {"pp": 2, "tp": 2, "chunks": 2, "placement": "v"},
)


def drawn_groups(seed: int, **settings: Any) -> Groups:
    """A pipeline, a hint, a limit and a scale of delays, all drawn."""
    draw = random.Random(seed)
    topology = Topology(**draw.choice(SHAPES))
    hints = RULES if topology.chunks > 1 else RULES + LISTS
    config = Config(
        microbatches=draw.randint(1, 9),
        hint=draw.choice(hints),
        limit=draw.choice(["auto", 1, 2, 3, 8]),
        deterministic=draw.random() < 0.8,
        **settings,
    )
    scales = [0.0, 1e-4, 1e-3, 1e-2, 1e-1]
    times = Times(draw, message_s=draw.choice(scales), tensor_s=draw.choice(scales))
    return Groups(topology, config, times)


def assert_one_order(groups: Groups) -> None:
    """All ranks of each group ran the same tasks in the same order."""
    for rank in groups.ranks:
        first = groups.ranks[tp_group(groups.topology, rank.number)[0]]
        assert rank.order == first.order, rank.number


@pytest.mark.parametrize("protocol", TP_PROTOCOLS)
@pytest.mark.parametrize(
    "seeds", [range(150), pytest.param(range(150, 3000), marks=pytest.mark.slow)]
)
def test_a_group_runs_one_order_to_its_end_within_its_limit(protocol: str, seeds: range) -> None:
    """No deadlock, no two collectives, never past the bound: pipelines, hints, delays drawn."""
    for seed in seeds:
        groups = drawn_groups(seed, tp_protocol=protocol)
        try:
            groups.run_step()
            assert_one_order(groups)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {groups.topology}, {groups.config}") from error


@pytest.mark.parametrize("protocol", TP_PROTOCOLS)
def test_a_forward_only_step_runs_one_order_too(protocol: str) -> None:
    """Evaluation agrees as training does."""
    for seed in range(50):
        groups = drawn_groups(seed, tp_protocol=protocol)
        groups.run_step(backward=False)
        assert_one_order(groups)


def test_without_agreement_ranks_enter_different_collectives() -> None:
    """What the search finds where every rank takes its own choice: it can fail."""
    config = Config(microbatches=8, hint="bf")
    found = 0
    for seed in range(20):
        times = Times(random.Random(seed), tensor_s=1e-2)
        groups = Groups(
            Topology(4, tp=2), config, times, make=lambda frontier, **_: OwnChoice(frontier)
        )
        try:
            groups.run_step()
        except DifferentCollectives:
            found += 1
    assert found > 10


def test_the_leader_never_has_to_try_again_and_the_all_gather_does() -> None:
    """Retries are what tells them apart; numbers run from 0 without a gap on every rank."""
    retries = dict.fromkeys(TP_PROTOCOLS, 0)
    for protocol, seed in itertools.product(TP_PROTOCOLS, range(10)):
        config = Config(microbatches=8, hint="bf", tp_protocol=protocol)
        groups = Groups(Topology(4, tp=2), config, Times(random.Random(seed), tensor_s=1e-2))
        groups.run_step()
        for rank in groups.ranks:
            assert [agreed.number for agreed in rank.agreed] == list(range(len(rank.order)))
            retries[protocol] += sum(agreed.retries for agreed in rank.agreed)
    assert retries["leader"] == 0 < retries["allgather"]


def test_a_decision_is_there_before_the_task_before_it_has_ended() -> None:
    """With quick tensors and a slow control plane, the members lose hardly a message's time."""
    config = Config(microbatches=32, hint="bf")

    class Fixed(Times):
        def of(self, mean_s: float) -> float:
            return mean_s

    times = Fixed(random.Random(0), message_s=5e-3, tensor_s=0.0, task_s=10e-3)
    groups = Groups(Topology(1, tp=2), config, times)
    groups.run_step()
    assert groups.now_s == pytest.approx(64 * times.task_s + times.message_s)


def test_a_weight_gradient_is_decided_only_when_nothing_else_runs() -> None:
    """It fills a gap; while a task runs, something better may still come."""
    config = Config(microbatches=6, hint="bfw")
    groups = Groups(Topology(2, tp=2), config, Times(random.Random(1)))
    decider = groups.ranks[0].agreement._decider  # type: ignore[attr-defined] # the one subtle rule
    decided: list[tuple[TaskKind, int]] = []
    decide = decider.decide

    def noted() -> Any:
        before = decider._unfinished
        agreed = decide()
        if agreed is not None:
            decided.append((agreed.decision.task.kind, before))
        return agreed

    decider.decide = noted
    groups.run_step()
    assert {before for kind, before in decided if kind is TaskKind.W} == {0}
    assert {before for kind, before in decided if kind is not TaskKind.W} == {0, 1}


def test_clocks_that_differ_for_sure_are_set_right_and_others_left_alone() -> None:
    """Ranks of one host read one clock: an offset within the error is none."""
    clock = SharedClock(lambda: 10.0)
    assert clock.now_s() == 10.0
    clock.follow(Alignment(offset_s=5.0, error_s=0.1))
    assert (clock.now_s(), clock.own_s(15.0)) == (15.0, 10.0)
    clock.follow(Alignment(offset_s=0.05, error_s=0.1))
    assert clock.now_s() == 10.0


def test_a_rank_alone_needs_no_agreement() -> None:
    """It takes its arbiter's choice."""
    groups = Groups(Topology(3), Config(microbatches=4), Times(random.Random(0)))
    assert all(isinstance(rank.agreement, OwnChoice) for rank in groups.ranks)
    assert groups.ranks[0].agreement.leader is None
    groups.run_step()


def test_the_leader_counts_what_its_rank_has_under_way() -> None:
    """In evaluation open sends hold decisions back, those of the rank as it runs."""
    groups = Groups(Topology(8, tp=2), Config(microbatches=64, hint="bf"), Times(random.Random(0)))
    leader = groups.ranks[0]
    running = leader.frontier.backpressure
    leader.frontier.begin_step(64, backward=False, split=(), reduced={})
    leader.agreement.begin_step(0, 64, backward=False, split=())
    for _ in range(running.bound):
        running.send_opened()
    task = leader.agreement.choose().task
    assert task is not None
    leader.agreement.commit(leader.agreement.choose())
    leader.frontier.completed(task)
    leader.agreement.finished(task)
    assert leader.agreement.choose().task is None
    running.send_closed()
    assert leader.agreement.choose().task is not None

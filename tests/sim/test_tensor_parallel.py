"""The virtual cluster with tensor-parallel groups: one order, one end, no hang."""

import asyncio
import dataclasses
import random
from pathlib import Path
from typing import Any, Literal

import pytest

from rrfp_async.arbiter import Decision
from rrfp_async.bus.inproc import InprocBus
from rrfp_async.bus.messages import AgreementMessage
from rrfp_async.config import TP_PROTOCOLS, Config
from rrfp_async.errors import StepFailed
from rrfp_async.executor import Executor
from rrfp_async.frontier import Frontier
from rrfp_async.grid import tp_group
from rrfp_async.ids import Link, TaskId
from rrfp_async.sim import cluster as cluster_module
from rrfp_async.sim.cluster import Simulated, VirtualCluster
from rrfp_async.sim.costs import Costs
from rrfp_async.sim.lateness import Lateness
from rrfp_async.sim.rendezvous import Rendezvous
from rrfp_async.topology import Topology
from rrfp_async.tp.agreement import Agreement, OwnChoice
from rrfp_async.tp.allgather import AllgatherAgreement
from rrfp_async.tp.leader import LeaderAgreement
from tests import logs
from tests.sim.guarded import GuardedLoop, clock, play
from tests.sim.tables import STYLES, costs_of, drawn, even

Protocol = Literal["leader", "allgather"]

SEEDS, SAMPLE = 50, 3
GRIDS = [Topology(4, tp=2), Topology(2, tp=4)]
BOTH = pytest.mark.parametrize("protocol", TP_PROTOCOLS)
EITHER_GRID = pytest.mark.parametrize("topology", GRIDS, ids=["PP4 x TP2", "PP2 x TP4"])


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that spins fails the test instead of hanging it."""
    monkeypatch.setattr(cluster_module, "VirtualLoop", GuardedLoop)


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[TaskId]]:
    """What each rank's device is given, in order, by the rank of the step that runs."""
    given: dict[int, list[TaskId]] = {}
    commit = Executor._commit

    def noting(self: Executor, decision: Any, task: TaskId, waited_s: float) -> None:
        given.setdefault(self._world.rank, []).append(task)
        commit(self, decision, task, waited_s)

    monkeypatch.setattr(Executor, "_commit", noting)
    return given


def step_of(
    costs: Costs, topology: Topology, protocol: Protocol, lateness: Lateness, **settings: Any
) -> Simulated:
    config = Config(microbatches=costs.microbatches, tp_protocol=protocol, **settings)
    return VirtualCluster(costs, config, topology, lateness=lateness).run_step()


def check_orders(orders: dict[int, list[TaskId]], topology: Topology, tasks: int) -> None:
    """Every rank ran as many tasks, in the order in which its whole group did."""
    for rank in range(topology.world_size):
        assert len(orders[rank]) == tasks
        assert orders[rank] == orders[tp_group(topology, rank)[0]], f"rank {rank}"


def check_seed(
    seed: int, topology: Topology, protocol: Protocol, orders: dict[int, list[TaskId]]
) -> None:
    """A drawn step with drawn lateness: equal orders, all tasks, peaks within the limit."""
    source = random.Random(f"{seed}/{protocol}")
    microbatches, limit = source.randint(1, 10), source.randint(1, 6)
    tables = drawn(source, topology.num_stages, microbatches, STYLES[seed % len(STYLES)])
    hint = source.choice(["bf", "bfw", "auto", "f-priority"])
    lateness = Lateness(source.choice([0.0, 0.05, 0.7]), source.choice([0.1, 1.0, 4.0]), seed)
    orders.clear()
    step = step_of(costs_of(tables), topology, protocol, lateness, hint=hint, limit=limit)
    check_orders(orders, topology, (2 if hint in ("bf", "f-priority") else 3) * microbatches)
    assert max(report.peak_in_flight for report in step.reports) <= limit
    for report in step.reports:
        assert report.agreement is not None
        assert report.agreement.decisions == len(orders[0])


# -- one order in a group -----------------------------------------------------------------------


@BOTH
@EITHER_GRID
def test_members_run_the_same_order_on_a_sample(
    topology: Topology, protocol: Protocol, orders: dict[int, list[TaskId]]
) -> None:
    """The first of the fifty."""
    for seed in range(SAMPLE):
        check_seed(seed, topology, protocol, orders)


@pytest.mark.slow
@BOTH
@EITHER_GRID
def test_members_run_the_same_order_whatever_comes_late(
    topology: Topology, protocol: Protocol, orders: dict[int, list[TaskId]]
) -> None:
    """Fifty seeds of costs, hints, limits, skews and control delays: no deadlock, no overrun."""
    for seed in range(SEEDS):
        check_seed(seed, topology, protocol, orders)


def test_without_agreement_the_skew_would_part_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each member by its own choice: the draws above do ask for an agreement."""
    monkeypatch.setattr("rrfp_async.dispatcher.make_agreement", _own_choice)
    costs = costs_of(drawn(random.Random(0), 4, 8, "random"))
    lateness = Lateness(skew_s=2.0)
    with pytest.raises(StepFailed, match="have entered different tasks"):
        step_of(costs, Topology(4, tp=2), "leader", lateness, hint="bf")


def _own_choice(frontier: Frontier, **_others: Any) -> Agreement:
    return OwnChoice(frontier)


def test_an_all_gather_of_which_nothing_is_late_is_a_rank_s_own_choice() -> None:
    """The same makespan under the same limit; a leader may differ, as it is one task ahead."""
    for seed in range(6):
        tables = drawn(random.Random(seed), 4, 6, STYLES[seed])
        spans = [
            step_of(costs_of(tables), Topology(4, tp=tp), "allgather", Lateness(), limit=5)
            for tp in (1, 2, 4)
        ]
        assert [step.makespan_s for step in spans] == pytest.approx([spans[0].makespan_s] * 3)


@BOTH
def test_where_agreeing_takes_no_time_nothing_waits_for_it(protocol: Protocol) -> None:
    """Whatever the skew: a task starts when the last member has what it needs."""
    for seed in range(6):
        costs = costs_of(drawn(random.Random(seed), 3, 6, STYLES[seed]))
        late = Lateness(0.0, 0.7, seed)
        step = step_of(costs, Topology(3, tp=2), protocol, late, hint="bf", limit=4)
        for report in step.reports:
            assert report.agreement is not None
            assert report.agreement.wait_s == pytest.approx(0.0, abs=1e-8)


def test_the_records_show_one_order_for_a_group(tmp_path: Path) -> None:
    """What `rrfp` reads: dispatches, in order, equal on members; real skew in the times."""
    topology, costs = Topology(3, tp=2), costs_of(even(3, 5, delay_s=0.1))
    step_of(costs, topology, "leader", Lateness(0.01, 0.5), trace_dir=tmp_path)
    for leader in (0, 2, 4):
        tasks = logs.dispatched(tmp_path, leader)
        assert tasks == logs.dispatched(tmp_path, leader + 1)
        assert len(tasks) == 15


# -- meeting in a task --------------------------------------------------------------------------


@BOTH
def test_a_planted_disagreement_fails_the_step_at_once(
    protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 3 enters another microbatch than its peer: named with both tasks, no hang."""
    enter = Rendezvous.enter

    async def astray(self: Rendezvous, rank: int, task: TaskId) -> None:
        other = TaskId(task.stage, task.kind, 4) if (rank, task.microbatch) == (3, 2) else task
        await enter(self, rank, other)

    monkeypatch.setattr(Rendezvous, "enter", astray)
    with pytest.raises(StepFailed) as failed:
        step_of(costs_of(even(2, 5)), Topology(2, tp=2), protocol, Lateness(), hint="bf")
    assert "have entered different tasks: rank 2 1F2, rank 3 1F4" in str(failed.value)
    assert failed.value.stage == 1


@BOTH
def test_a_choice_against_the_agreement_fails_the_step(
    protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 runs a task of its own choosing where its group agreed on another: no hang."""
    class_of = {"leader": LeaderAgreement, "allgather": AllgatherAgreement}[protocol]
    choose = class_of.choose

    def stubborn(self: Any) -> Decision:
        decision: Decision = choose(self)
        ready = sorted(map(str, self._frontier.arbiter.ready))
        if self._rank != 2 or decision.task is None or len(ready) < 2:
            return decision
        other = next(task for task in map(TaskId.parse, ready) if task != decision.task)
        return dataclasses.replace(decision, task=other)

    def at_will(self: Any, decision: Decision) -> None:
        self._frontier.arbiter.follow(decision.task)

    monkeypatch.setattr(class_of, "choose", stubborn)
    commit = class_of.commit
    monkeypatch.setattr(
        class_of,
        "commit",
        lambda self, decision: (at_will if self._rank == 2 else commit)(self, decision),
    )
    costs = costs_of(even(1, 5))
    with pytest.raises(StepFailed, match=r"different tasks: (rank \d 0F\d, )+rank 2 0F\d"):
        step_of(costs, Topology(1, tp=3), protocol, Lateness(), hint="f-priority")


def test_a_member_that_never_comes_fails_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stall, in virtual time: the report tells who waits."""
    enter = Rendezvous.enter

    async def astray(self: Rendezvous, rank: int, task: TaskId) -> None:
        if rank != 1:
            await enter(self, rank, task)
        else:
            await clock().create_future()

    monkeypatch.setattr(Rendezvous, "enter", astray)
    with pytest.raises(StepFailed, match="nothing progressed on any rank"):
        step_of(costs_of(even(2, 2)), Topology(2, tp=2), "leader", Lateness())


def test_a_meeting_ends_when_the_last_has_come_and_can_be_held_again() -> None:
    """Three ranks, two tasks; all leave at the instant of the last one."""

    async def main() -> list[tuple[int, str, float]]:
        meeting, left = Rendezvous((4, 5, 6)), []

        async def member(rank: int, late_s: float) -> None:
            for word in ("0F0", "0B0"):
                await asyncio.sleep(late_s)
                await meeting.enter(rank, TaskId.parse(word))
                left.append((rank, word, clock().time()))

        async with asyncio.TaskGroup() as group:
            for rank, late_s in ((4, 1.0), (5, 3.0), (6, 2.0)):
                group.create_task(member(rank, late_s))
        return sorted(left, key=lambda one: (one[2], one[0]))

    assert play(main()) == [
        *[(rank, "0F0", 3.0) for rank in (4, 5, 6)],
        *[(rank, "0B0", 6.0) for rank in (4, 5, 6)],
    ]


def test_members_end_together_and_waiting_is_neither_computing_nor_blocking() -> None:
    """One member's activation comes up to 3 s later than the other's; both compute as long."""
    costs = costs_of(even(2, 4))
    step = step_of(costs, Topology(2, tp=2), "leader", Lateness(0.25, 3.0, 7), hint="bf")
    for report in step.reports:
        assert report.agreement is not None
        assert report.compute_s == pytest.approx(costs.work_s(0))
        assert report.compute_s + report.blocking_s <= step.makespan_s + 1e-9
        lost_s = step.makespan_s - report.compute_s - report.blocking_s
        assert lost_s == pytest.approx(report.agreement.wait_s)


# -- late messages, late tensors ----------------------------------------------------------------


def test_a_control_delay_is_paid_before_every_task_of_an_all_gather() -> None:
    """One stage: nothing is awaited but the proposals; the leader is one task ahead."""
    costs, topology = costs_of(even(1, 6)), Topology(1, tp=2)
    late = Lateness(0.5)
    allgather = step_of(costs, topology, "allgather", late, hint="bf")
    assert allgather.makespan_s == pytest.approx(18.0 + 12 * 0.5)
    leader = step_of(costs, topology, "leader", late, hint="bf")
    assert leader.makespan_s == pytest.approx(18.0 + 0.5)


def test_only_agreement_messages_are_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each by just the delay, in order; a step begins and ends without any."""
    sent: list[tuple[bool, int, int, float]] = []
    send = InprocBus.send_nowait

    def noting(self: InprocBus, target: int, message: Any) -> None:
        sent.append((isinstance(message, AgreementMessage), self.rank, target, clock().time()))
        send(self, target, message)

    monkeypatch.setattr(InprocBus, "send_nowait", noting)
    step_of(costs_of(even(1, 3)), Topology(1, tp=2), "allgather", Lateness(0.5), hint="bf")
    starts = [time_s for agrees, rank, _, time_s in sent if agrees and rank == 0]
    assert starts == pytest.approx([0.5, 2.0, 4.5, 6.0, 8.5, 10.0])
    assert {time_s for agrees, *_, time_s in sent if not agrees} <= {0.0, 12.0}


@BOTH
def test_the_seed_of_a_skew_decides_it(protocol: Protocol) -> None:
    """The same again for the same; no skew, no difference."""
    costs, topology = costs_of(even(3, 5)), Topology(3, tp=2)

    def span(seed: int, skew_s: float) -> float:
        return step_of(costs, topology, protocol, Lateness(0.0, skew_s, seed)).makespan_s

    assert span(1, 1.0) == span(1, 1.0) != span(2, 1.0)
    assert span(1, 0.0) == span(2, 0.0) < min(span(1, 1.0), span(2, 1.0))


def test_skews_are_drawn_for_each_link_and_transfer() -> None:
    """Uniform from 0 to the most; members have draws of their own."""
    draw, other = (Lateness(0.0, 2.0, 3).skews(Link(0, target)) for target in (2, 3))
    drawn_s = [draw() for _ in range(400)]
    assert 0.0 <= min(drawn_s) < 0.1
    assert 1.9 < max(drawn_s) <= 2.0
    assert sum(drawn_s) / 400 == pytest.approx(1.0, abs=0.1)
    assert other() != drawn_s[0]
    assert Lateness(0.0, 2.0, 3).skews(Link(0, 2))() == drawn_s[0]


def test_what_ranks_cannot_agree_on_is_refused() -> None:
    """As by a Runtime."""
    config = Config(microbatches=3, tp_protocol="allgather", activation_budget_bytes=1000)
    with pytest.raises(ValueError, match="activation_budget_bytes=1000"):
        VirtualCluster(costs_of(even(2, 3)), config, Topology(2, tp=2))

"""A pipeline of many ranks without processes, tensors or a loop: the core under random events.

Each rank is driven as the Dispatcher drives it: events into its ReadySet and Backpressure, what
became ready into its Arbiter, one task at a time. Whatever may happen next (a task completes, a
message is delivered, an idle rank gets to choose) lies in one pool, and a seeded draw picks from
it, so messages overtake one another at will. Every call is judged by a `Ledger`.
"""

import random
from collections.abc import Callable
from functools import partial

from rrfp_async.arbiter import PASSED_OVER_MOST, Arbiter, Decision, Reason
from rrfp_async.backpressure import Backpressure
from rrfp_async.hints import Execution, HintOrder, Schedule, make_order, resolve_hint
from rrfp_async.ids import Edge, TaskId, TaskKind
from rrfp_async.limits import FixedLimit
from rrfp_async.ready_set import ReadySet
from tests.core.case import Case, Step
from tests.core.ledger import Ledger


def run(case: Case) -> list[Ledger]:
    """Run every step of `case`; returns what happened in each.

    Raises:
        AssertionError: If a rank did what the step's ledger does not allow, or the step stuck.
    """
    pipeline = Pipeline(case)
    return [pipeline.run_step(step) for step in case.steps]


class Rank:
    """The decision core of one rank, and whether it is busy."""

    def __init__(self, case: Case, rank: int, hint: HintOrder | Schedule) -> None:
        self.rank = rank
        self.split = case.split
        self.ready_set = ReadySet(case.topology, rank, deterministic=case.deterministic)
        self.backpressure = Backpressure(FixedLimit(case.limits[rank]), chunks=case.chunks)
        execution = Execution(binding=False, deterministic=case.deterministic)
        order = make_order(hint, case.topology, rank, execution)
        self.arbiter = Arbiter(order, self.backpressure)
        self.running: TaskId | None = None
        self.choosing = False

    def begin_step(self, step: Step) -> None:
        """Start a step as the Dispatcher does."""
        tasks = self.ready_set.begin_step(
            step.microbatches, backward=step.backward, split=self.split
        )
        self.arbiter.begin_step(tasks)
        self.arbiter.add(self.ready_set.ready_now())


class Pipeline:
    """All ranks of a case and the events that are yet to happen."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._random = random.Random(case.seed)
        hint = resolve_hint(case.hint)
        self._ranks = [Rank(case, rank, hint) for rank in range(len(case.limits))]
        self._pool: list[Callable[[], None]] = []

    def run_step(self, step: Step) -> Ledger:
        """Let things happen until nothing can any more."""
        self._ledger = Ledger(self._case, step)
        for rank in self._ranks:
            rank.begin_step(step)
            self._wake(rank)
        while self._pool:
            self._draw()()
        self._check_end()
        return self._ledger

    def _draw(self) -> Callable[[], None]:
        if self._random.random() >= self._case.newest_first:
            place = self._random.randrange(len(self._pool))
            self._pool[place], self._pool[-1] = self._pool[-1], self._pool[place]
        return self._pool.pop()

    def _wake(self, rank: Rank) -> None:
        if rank.running is None and not rank.choosing:
            rank.choosing = True
            self._pool.append(partial(self._choose, rank))

    def _choose(self, rank: Rank) -> None:
        rank.choosing = False
        decision = rank.arbiter.choose()
        assert rank.arbiter.choose() == decision, "choosing changed the choice"
        self._judge(rank, decision)
        if decision.task is None:
            return
        rank.arbiter.commit(decision)
        self._ledger.start(decision.task)
        self._check_counts(rank)
        rank.running = decision.task
        self._pool.append(partial(self._completed, rank, decision.task))

    def _judge(self, rank: Rank, decision: Decision) -> None:
        ready = self._ledger.ready_on[rank.rank]
        allowed = {task for task in ready if self._ledger.is_admissible(task)}
        assert decision.ready == len(ready)
        if decision.task is None:
            why = Reason.BACKPRESSURE if ready else Reason.NOTHING_READY
            assert not allowed, f"rank {rank.rank} idles though {allowed} may run"
            assert decision.reason is why
        else:
            assert decision.task in allowed, f"{decision.task} is not among {allowed}"
        assert len(decision.passed_over) <= PASSED_OVER_MOST
        for task in decision.passed_over:
            assert self._ledger.rank_of[task.stage] == rank.rank
            assert task in self._ledger.tasks
            assert task not in self._ledger.started, f"{task} ran, yet was passed over"
            assert task not in allowed, f"{task} might have run, yet was passed over"

    def _completed(self, rank: Rank, task: TaskId) -> None:
        rank.running = None
        ready = rank.ready_set.completed(task)
        rank.backpressure.completed(task)
        self._became_ready(rank, ready, self._ledger.finish(task))
        self._check_counts(rank)
        if task.kind is TaskKind.F:
            for target in self._ledger.targets[task.stage]:
                self._send_activation(rank, Edge(task.stage, target), task.microbatch)
        elif task.kind is not TaskKind.W:
            for source in self._ledger.sources[task.stage]:
                edge = Edge(source, task.stage)
                deliver = partial(self._gradient_delivered, edge, task.microbatch)
                if self._is_local(edge):
                    deliver()
                else:
                    self._pool.append(deliver)

    def _is_local(self, edge: Edge) -> bool:
        return self._ledger.rank_of[edge.source] == self._ledger.rank_of[edge.target]

    def _send_activation(self, rank: Rank, edge: Edge, microbatch: int) -> None:
        if self._is_local(edge):
            self._activation_arrived(edge, microbatch)
            return
        rank.backpressure.send_opened()
        self._ledger.open_sends[rank.rank] += 1
        self._check_counts(rank)
        self._pool.append(partial(self._activation_delivered, edge, microbatch))

    def _activation_delivered(self, edge: Edge, microbatch: int) -> None:
        sender = self._owner(edge.source)
        self._activation_arrived(edge, microbatch)
        sender.backpressure.send_closed()
        self._ledger.open_sends[sender.rank] -= 1
        self._check_counts(sender)
        self._wake(sender)

    def _owner(self, stage: int) -> Rank:
        return self._ranks[self._ledger.rank_of[stage]]

    def _activation_arrived(self, edge: Edge, microbatch: int) -> None:
        receiver = self._owner(edge.target)
        assert receiver.ready_set.expects_activation(edge, microbatch)
        ready = receiver.ready_set.activation_arrived(edge, microbatch)
        expected = self._ledger.arrive(TaskKind.F, edge.source, edge.target, microbatch)
        self._became_ready(receiver, ready, expected)

    def _gradient_delivered(self, edge: Edge, microbatch: int) -> None:
        receiver = self._owner(edge.source)
        assert receiver.ready_set.expects_gradient(edge, microbatch)
        ready = receiver.ready_set.gradient_arrived(edge, microbatch)
        expected = self._ledger.arrive(TaskKind.B, edge.source, edge.target, microbatch)
        self._became_ready(receiver, ready, expected)

    def _became_ready(self, rank: Rank, ready: list[TaskId], expected: set[TaskId]) -> None:
        assert len(ready) == len(expected), f"{ready} became ready, not {expected}"
        assert set(ready) == expected, f"{ready} became ready, not {expected}"
        rank.arbiter.add(ready)
        self._wake(rank)

    def _check_counts(self, rank: Rank) -> None:
        counted = (rank.backpressure.in_flight, rank.backpressure.open_sends)
        true = (self._ledger.in_flight[rank.rank], self._ledger.open_sends[rank.rank])
        assert counted == true, f"rank {rank.rank} counts {counted} where there are {true}"

    def _check_end(self) -> None:
        self._ledger.check_complete()
        for rank in self._ranks:
            assert rank.running is None
            assert rank.ready_set.remaining == 0, rank.ready_set.summary()
            assert rank.backpressure.peak == self._ledger.peak[rank.rank]
            assert rank.arbiter.choose().reason is Reason.NOTHING_READY

"""A pipeline of tensor-parallel groups in plain Python: real frontiers and agreements, drawn times.

Messages and tensors take their time, in order between two ranks; tasks take theirs, and those that
enter a collective end when the last of the group has come to it. A group that would enter different
collectives is found at once.
"""

import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from rrfp_async.bus.messages import AgreementMessage
from rrfp_async.clocks import SharedClock
from rrfp_async.config import Config
from rrfp_async.frontier import Frontier
from rrfp_async.grid import Column, coordinates, tp_group
from rrfp_async.ids import Edge, TaskId, TaskKind
from rrfp_async.topology import Topology
from rrfp_async.tp.agreement import Agreed, Agreement
from rrfp_async.tp.group import make_agreement


class DifferentCollectives(AssertionError):
    """Ranks of a group have begun different tasks: on a real cluster they would hang."""


@dataclass
class Times:
    """Draws how long things take, in seconds."""

    draw: random.Random
    message_s: float = 1e-3
    tensor_s: float = 2e-3
    task_s: float = 10e-3

    def of(self, mean_s: float) -> float:
        """Mostly short, now and then five times the mean and more."""
        return self.draw.expovariate(1.0 / mean_s) if mean_s else 0.0


@dataclass
class Rank:
    """One rank, and what it has run."""

    number: int
    frontier: Frontier
    agreement: Agreement
    order: list[TaskId] = field(default_factory=list)
    agreed: list[Agreed] = field(default_factory=list)
    running: TaskId | None = None
    most_in_flight: int = 0


Make = Callable[..., Agreement]


class Groups:
    """All ranks of a pipeline with `tp` above 1, through one step.

    Args:
        topology: Theirs.
        config: Hint, limit and protocol.
        times: What everything takes.
        make: Makes a rank's agreement; another one to see what is found without it.
    """

    def __init__(
        self, topology: Topology, config: Config, times: Times, *, make: Make = make_agreement
    ) -> None:
        self.topology = topology
        self.config = config
        self.times = times
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._last_s: defaultdict[tuple[object, int, int], float] = defaultdict(float)
        self._entered: defaultdict[tuple[int, ...], dict[int, TaskId]] = defaultdict(dict)
        self.ranks = [self._rank(number, make) for number in range(topology.world_size)]

    def _rank(self, number: int, make: Make) -> Rank:
        frontier = Frontier(self.topology, coordinates(self.topology, number).pp, self.config)
        agreement = make(
            frontier,
            topology=self.topology,
            rank=number,
            config=self.config,
            send=partial(self._say, number),
            clock=SharedClock(lambda: self.now_s),
            changed=lambda: None,
        )
        return Rank(number, frontier, agreement)

    def run_step(self, *, backward: bool = True) -> None:
        """Run a step to its end.

        Raises:
            DifferentCollectives: If a group does not agree.
            AssertionError: If nothing goes on before all has run, or more is in flight than may be.
        """
        for rank in self.ranks:
            stages = self.topology.stages_of(coordinates(self.topology, rank.number).pp)
            split = stages if self.config.splits else ()
            microbatches = self.config.microbatches
            rank.frontier.begin_step(microbatches, backward=backward, split=split, reduced={})
            rank.agreement.begin_step(0, microbatches, backward=backward, split=split)
        self._go_on()
        while self._events:
            self.now_s, _, happens = heapq.heappop(self._events)
            happens()
            self._go_on()
        left = {rank.number: rank.frontier.ready_set.summary() for rank in self.ranks}
        assert not any(rank.frontier.ready_set.remaining for rank in self.ranks), left

    def _go_on(self) -> None:
        for rank in self.ranks:
            if rank.running is None and rank.frontier.ready_set.remaining:
                decision = rank.agreement.choose()
                if decision.task is not None:
                    agreed = rank.agreement.commit(decision)
                    rank.agreed += [agreed] if agreed else []
                    self._begin(rank, decision.task)

    def _begin(self, rank: Rank, task: TaskId) -> None:
        rank.running = task
        rank.order.append(task)
        pressure = rank.frontier.backpressure
        rank.most_in_flight = max(rank.most_in_flight, pressure.in_flight)
        leads = tp_group(self.topology, rank.number)[0]  # its limit is the group's
        assert pressure.in_flight <= self.ranks[leads].frontier.backpressure.bound, rank.number
        if task.kind is TaskKind.W:
            self._after(self.times.of(self.times.task_s), partial(self._end, rank, task))
            return
        group = tp_group(self.topology, rank.number)
        entered = self._entered[group]
        entered[rank.number] = task
        if len(set(entered.values())) > 1:
            raise DifferentCollectives(f"ranks {group} entered {entered}")
        if len(entered) == len(group):
            entered.clear()
            takes_s = self.times.of(self.times.task_s)
            for member in group:
                self._after(takes_s, partial(self._end, self.ranks[member], task))

    def _end(self, rank: Rank, task: TaskId) -> None:
        rank.running = None
        rank.frontier.completed(task)
        self._measure(rank)
        self._send_result(rank, task)
        rank.agreement.finished(task)

    def _measure(self, rank: Rank) -> None:
        """What a limit may follow; every rank measures something else."""
        pressure = rank.frontier.backpressure
        pressure.measured(task_s=self.times.of(self.times.task_s))
        pressure.measured(transfer_s=self.times.of(self.times.tensor_s))

    def _send_result(self, rank: Rank, task: TaskId) -> None:
        column, graph = Column.of(self.topology, rank.number), self.topology
        if task.kind is TaskKind.F:
            ends = [(edge, edge.target) for edge in graph.out_edges(task.stage)]
        elif task.kind is TaskKind.W:
            ends = []
        else:
            ends = [(edge, edge.source) for edge in graph.in_edges(task.stage)]
        for edge, stage in ends:
            if not graph.is_local(edge):
                arrives = partial(self._arrive, column.rank_of(stage), edge, task)
                self._in_order((edge, rank.number, stage), self.times.tensor_s, arrives)

    def _arrive(self, number: int, edge: Edge, task: TaskId) -> None:
        self.ranks[number].agreement.arrived(edge, task)

    def _say(self, source: int, target: int, message: AgreementMessage) -> None:
        hears = partial(self._hear, source, target, message)
        self._in_order(("says", source, target), self.times.message_s, hears)

    def _hear(self, source: int, target: int, message: AgreementMessage) -> None:
        self.ranks[target].agreement.on_message(source, message)

    def _in_order(
        self, way: tuple[object, int, int], mean_s: float, happens: Callable[[], None]
    ) -> None:
        time_s = max(self._last_s[way], self.now_s + self.times.of(mean_s))
        self._last_s[way] = time_s
        self._at(time_s, happens)

    def _after(self, seconds: float, happens: Callable[[], None]) -> None:
        self._at(self.now_s + seconds, happens)

    def _at(self, time_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), happens))

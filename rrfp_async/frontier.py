"""The line between what has run on a rank and what may: each event moves all that decides at once.

An arrival or a completion changes the ready set, what the arbiter chooses among and what
backpressure counts. Here these three move together, so that whoever hears of an event says it once.
Plain synchronous Python. It does not know where events come from, or who runs what is chosen.
"""

from collections.abc import Collection, Mapping, Sequence

from rrfp_async.arbiter import Arbiter
from rrfp_async.backpressure import Backpressure
from rrfp_async.config import Config
from rrfp_async.hints import make_order
from rrfp_async.ids import Edge, TaskId, TaskKind
from rrfp_async.limits import Limit, make_limit
from rrfp_async.ready_set import ReadySet
from rrfp_async.topology import Topology


def _must_be_alike(topology: Topology, config: Config) -> bool:
    """Whether ranks choose each for itself and must come to the same."""
    return topology.tp > 1 and config.tp_protocol == "allgather"


class Frontier:
    """The ready set, the arbiter and the backpressure of one rank.

    Args:
        topology: The pipeline.
        pp_rank: The rank's place in it.
        config: The hint, the limit and whether gradients are accumulated in order.
        limit: Where another frontier of the rank measures, its limit; by default one of its own.

    Attributes:
        ready_set: What tasks still need.
        backpressure: What may still be admitted.
        arbiter: The choice among what is ready.
        limit: How many forwards may be in flight.
    """

    def __init__(
        self, topology: Topology, pp_rank: int, config: Config, *, limit: Limit | None = None
    ) -> None:
        self._topology = topology
        self.limit = limit or make_limit(
            config.limit,
            topology,
            pp_rank,
            split=config.splits,
            budget_bytes=config.activation_budget_bytes,
        )
        self.ready_set = ReadySet(topology, pp_rank, deterministic=config.deterministic)
        self.backpressure = Backpressure(
            self.limit, chunks=topology.chunks, measures=not _must_be_alike(topology, config)
        )
        order = make_order(config.order, topology, pp_rank, config.execution)
        self.arbiter = Arbiter(order, self.backpressure)

    def begin_step(
        self,
        microbatches: int,
        *,
        backward: bool,
        split: Collection[int],
        reduced: Mapping[TaskId, Sequence[int | TaskId]],
    ) -> None:
        """Start a step; see `ReadySet.begin_step`. What needs nothing is ready.

        Raises:
            ValueError: If the hint or the limit does not fit the step.
        """
        tasks = self.ready_set.begin_step(
            microbatches, backward=backward, split=split, reduced=reduced
        )
        self.arbiter.begin_step([task for task in tasks if task.kind is not TaskKind.R])
        self.arbiter.add(self.ready_set.ready_now())

    def arrived(self, edge: Edge, maker: TaskId) -> list[TaskId]:
        """What `maker` made has come along `edge`; returns the reductions that may begin."""
        forward = maker.kind is TaskKind.F
        meet = self.ready_set.activation_arrived if forward else self.ready_set.gradient_arrived
        return self._add(meet(edge, maker.microbatch))

    def completed(self, task: TaskId) -> list[TaskId]:
        """What waits for `task` on this rank may run; returns the reductions among it."""
        self.backpressure.completed(task)
        ready = self.ready_set.completed(task)
        if task.kind is TaskKind.F:
            for edge in filter(self._topology.is_local, self._topology.out_edges(task.stage)):
                ready += self.ready_set.activation_arrived(edge, task.microbatch)
        elif task.kind in (TaskKind.B, TaskKind.I):
            for edge in filter(self._topology.is_local, self._topology.in_edges(task.stage)):
                if self.ready_set.expects_gradient(edge, task.microbatch):  # else none is wanted
                    ready += self.ready_set.gradient_arrived(edge, task.microbatch)
        return self._add(ready)

    def ungraded(self, forward: TaskId) -> list[TaskId]:
        """No gradient will come for a forward that has run; returns the reductions that may begin.

        It comes over every out-edge or over none.
        """
        ready: list[TaskId] = []
        for edge in self._topology.out_edges(forward.stage):
            ready += self.ready_set.gradient_arrived(edge, forward.microbatch)
        return self._add(ready)

    def drop_backward(self, forward: TaskId) -> list[TaskId]:
        """A forward's backward would do nothing: leave out and return what is not ready."""
        dropped = []
        for kind in (TaskKind.B, TaskKind.I, TaskKind.W):
            task = TaskId(forward.stage, kind, forward.microbatch)
            if self.ready_set.void(task):
                self.arbiter.drop(task)
                dropped.append(task)
        return dropped

    def end_step(self) -> None:
        """Forget a step that may have failed."""
        self.ready_set.reset()

    def _add(self, ready: list[TaskId]) -> list[TaskId]:
        """Let the arbiter choose among what is ready; reductions are for the caller to begin."""
        self.arbiter.add(task for task in ready if task.kind is not TaskKind.R)
        return [task for task in ready if task.kind is TaskKind.R]

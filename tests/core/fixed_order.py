"""A pipeline's decision cores run under one config, as `pipeline_model` runs them under a hint.

Nothing is judged here but that the step ends: what was decided is handed back, rank by rank. What
happens next (a task completes, something is delivered, an idle rank chooses) is drawn from a seed.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rrfp_async.arbiter import Arbiter, Decision
from rrfp_async.backpressure import Backpressure
from rrfp_async.config import Config
from rrfp_async.hints import Schedule, make_order
from rrfp_async.ids import Edge, TaskId, TaskKind
from rrfp_async.limits import make_limit
from rrfp_async.ready_set import ReadySet
from rrfp_async.topology import Topology
from rrfp_async.trace.records import DispatchRecord
from rrfp_async.trace.writer import JsonlTrace
from tests.core.words import tasks

Decided = list[list[Decision]]
"""The decisions with a task, rank by rank."""


class Written(Schedule):
    """The lists that a test wrote down, the same in every step."""

    def __init__(self, *rows: str | Sequence[TaskId], complete: bool = True) -> None:
        super().__init__()
        self.complete = complete
        self._rows = [tasks(row) if isinstance(row, str) else row for row in rows]

    @property
    def name(self) -> str:
        return "written"

    def orders(
        self, topology: Topology, microbatches: int, step: int
    ) -> Sequence[Sequence[TaskId]]:
        return self._rows


class Core:
    """The decision core of one rank, made as the Dispatcher makes it."""

    def __init__(self, config: Config, topology: Topology, rank: int) -> None:
        self.ready_set = ReadySet(topology, rank, deterministic=config.deterministic)
        self.backpressure = Backpressure(
            make_limit(config.limit, topology, rank, split=config.splits), chunks=topology.chunks
        )
        order = make_order(config.order, topology, rank, config.execution)
        self.arbiter = Arbiter(order, self.backpressure)
        self.decided: list[Decision] = []
        self.busy = False
        self._split = topology.stages_of(rank) if config.splits else ()

    def begin_step(self, microbatches: int, *, training: bool = True) -> None:
        """Start a step as the Dispatcher does."""
        self.decided = []
        self.arbiter.begin_step(
            self.ready_set.begin_step(microbatches, backward=training, split=self._split)
        )
        self.arbiter.add(self.ready_set.ready_now())


class Cores:
    """All ranks of a pipeline."""

    def __init__(self, config: Config, topology: Topology, *, seed: int = 0) -> None:
        config.check_order(topology)
        self._topology = topology
        self._config = config
        self._random = random.Random(seed)
        self._pool: list[Callable[[], None]] = []
        self.ranks = [Core(config, topology, rank) for rank in range(topology.world_size)]

    def run_step(self, microbatches: int | None = None, *, training: bool = True) -> Decided:
        """Run a step to its end."""
        count = self._config.microbatches if microbatches is None else microbatches
        for core in self.ranks:
            core.begin_step(count, training=training)
            self._pool.append(partial(self._choose, core))
        while self._pool:
            self._pool.pop(self._random.randrange(len(self._pool)))()
        for core in self.ranks:
            stuck = f"{core.ready_set.summary()}; {core.arbiter.choose()}"
            assert core.ready_set.remaining == 0, stuck
        return [core.decided for core in self.ranks]

    @property
    def peaks(self) -> list[int]:
        """The largest D of each rank in the last step."""
        return [core.backpressure.peak for core in self.ranks]

    def _choose(self, core: Core) -> None:
        decision = core.arbiter.choose()
        if core.busy or decision.task is None:
            return
        core.busy = True
        core.arbiter.commit(decision)
        core.decided.append(decision)
        self._pool.append(partial(self._completed, core, decision.task))

    def _completed(self, core: Core, task: TaskId) -> None:
        core.busy = False
        core.backpressure.completed(task)
        self._became_ready(core, core.ready_set.completed(task))
        if task.kind is TaskKind.F:
            for edge in self._topology.out_edges(task.stage):
                if self._topology.is_local(edge):
                    self._activation(edge, task.microbatch)
                else:
                    core.backpressure.send_opened()
                    self._pool.append(partial(self._sent, edge, task.microbatch))
        elif task.kind is not TaskKind.W:
            for edge in self._topology.in_edges(task.stage):
                if self._topology.is_local(edge):
                    self._gradient(edge, task.microbatch)
                else:
                    self._pool.append(partial(self._gradient, edge, task.microbatch))

    def _owner(self, stage: int) -> Core:
        return self.ranks[self._topology.rank_of(stage)]

    def _sent(self, edge: Edge, microbatch: int) -> None:
        sender = self._owner(edge.source)
        sender.backpressure.send_closed()
        self._pool.append(partial(self._choose, sender))
        self._activation(edge, microbatch)

    def _activation(self, edge: Edge, microbatch: int) -> None:
        receiver = self._owner(edge.target)
        self._became_ready(receiver, receiver.ready_set.activation_arrived(edge, microbatch))

    def _gradient(self, edge: Edge, microbatch: int) -> None:
        receiver = self._owner(edge.source)
        self._became_ready(receiver, receiver.ready_set.gradient_arrived(edge, microbatch))

    def _became_ready(self, core: Core, ready: list[TaskId]) -> None:
        core.arbiter.add(ready)
        self._pool.append(partial(self._choose, core))


def tasks_of(decided: Decided) -> list[list[TaskId]]:
    """What was dispatched, rank by rank."""
    return [[each.task for each in rank if each.task is not None] for rank in decided]


def write_logs(folder: Path, steps: list[Decided]) -> None:
    """Log decisions as a run does, a file for each rank."""
    for rank in range(len(steps[0])):
        with JsonlTrace(folder, rank) as trace:
            for step, decided in enumerate(steps):
                for decision in decided[rank]:
                    trace.write(DispatchRecord(step, rank, decision, 0.0, 0.0))

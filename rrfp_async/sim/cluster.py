"""One step of a whole pipeline on the virtual cluster: real Dispatchers, virtual time.

Every rank has the Dispatcher, Session, bus and core that it has in a real run. It does not know
where the costs come from or what a result is compared with.
"""

import asyncio
import gc
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from rrfp_async.bus.inproc import InprocHub
from rrfp_async.config import Config
from rrfp_async.dispatcher import Dispatcher
from rrfp_async.errors import StateError, StepFailed
from rrfp_async.gpu.completion import Clock
from rrfp_async.gpu.loopback import LoopbackFabric
from rrfp_async.grid import coordinates
from rrfp_async.result import result_of
from rrfp_async.session import Session
from rrfp_async.sim.clock import VirtualLoop
from rrfp_async.sim.costs import Costs
from rrfp_async.sim.parts import CostModelDevice, CostModelStage, DelayedLoopback
from rrfp_async.tasks.batch import Batch
from rrfp_async.tasks.step import StepReport, StepRequest
from rrfp_async.topology import Topology
from rrfp_async.trace.recorder import Recorder, open_recorder
from rrfp_async.world import Connecting, Wires, World

if sys.platform != "win32":
    import resource

T = TypeVar("T")

_FILES_PER_TRACE = 2
_OTHER_FILES = 256


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a step came to on the virtual cluster, in virtual seconds.

    Attributes:
        makespan_s: From the step's beginning until every rank is done.
        reports: What every rank reports.
    """

    makespan_s: float
    reports: tuple[StepReport, ...]


class VirtualCluster:
    """The ranks of a pipeline on one virtual clock.

    Args:
        costs: What tasks and transfers take; those between stages of one rank take nothing.
        topology: Whose stages they are; by default a chain, a stage on each rank.
        config: As for a real run; `microbatches` follows from the costs.
        dispatch_s: What it costs to dispatch a task, in seconds.
        done: Called after every task.

    Raises:
        ValueError: If a listed hint breaks a rule.
    """

    def __init__(
        self,
        costs: Costs,
        config: Config,
        topology: Topology | None = None,
        *,
        dispatch_s: float = 0.0,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self._costs = costs
        if not 0.0 <= dispatch_s < math.inf:
            raise ValueError(
                f"dispatch cost {dispatch_s} must be a finite number of seconds of at least 0"
            )
        tasks = 3 * costs.stages * costs.microbatches
        longest_s = costs.total_s + tasks * dispatch_s
        self._config = replace(
            config, microbatches=costs.microbatches, stall_timeout_s=2.0 * longest_s + 1.0
        )
        self._dispatch_s = dispatch_s
        self._done = done
        self._topology = Topology(costs.stages) if topology is None else topology
        if self._topology.num_stages != costs.stages:
            raise ValueError(
                f"costs are of {costs.stages} stages, the topology has "
                f"{self._topology.num_stages}: give as many of both"
            )
        self._config.check_order(self._topology)

    def run_step(self) -> Simulated:
        """Run one training step. Blocks; not from inside a running event loop.

        Raises:
            StateError: If an event loop is running here.
            StepFailed: If the step ends early.
            ValueError: If the hint does not fit the step.
            OSError: If a log cannot be opened.
        """
        _refuse_nesting()
        if self._config.trace_dir is not None:
            _allow_open_files(_FILES_PER_TRACE * self._topology.world_size)
        with _without_collection(), asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(self._run_step())

    async def _run_step(self) -> Simulated:
        loop = asyncio.get_running_loop()
        ranks = range(self._topology.world_size)
        hub, fabric = InprocHub(len(ranks)), LoopbackFabric()
        with ExitStack() as resources:
            cluster = [self._rank(rank, hub, fabric, resources) for rank in ranks]
            begun_s = loop.time()
            try:
                async with asyncio.TaskGroup() as group:
                    steps = [
                        group.create_task(one.run_step(self._request(rank)))
                        for rank, one in enumerate(cluster)
                    ]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from errors  # the first cause, not its company
            makespan_s = loop.time() - begun_s
        return Simulated(makespan_s, tuple(step.result() for step in steps))

    def _rank(
        self, rank: int, hub: InprocHub, fabric: LoopbackFabric, resources: ExitStack
    ) -> "_Rank":
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        bus = hub.open(rank)
        resources.callback(bus.close)
        wires = Wires(bus, DelayedLoopback(fabric, loop.time))
        device = CostModelDevice(
            self._costs, loop.time, dispatch_s=self._dispatch_s, done=self._done
        )
        world = World(
            rank,
            self._topology,
            device,
            loop.time,
            lambda _config: Connecting(lambda _resources: _given(wires)),
            settle=loop.settle,
            progress_every_s=float("inf"),
        )
        session = Session(
            bus=bus,
            rank=rank,
            topology=self._topology,
            settings=self._config.agreed(),
            clock=loop.time,
            stall_timeout_s=self._config.stall_timeout_s,
        )
        recorder = open_recorder(world.whose(self._config))
        resources.callback(recorder.close)
        dispatcher = Dispatcher(
            world=world,
            wires=wires,
            config=self._config,
            stages={
                stage: CostModelStage(stage, self._topology, self._costs, split=self._config.splits)
                for stage in self._topology.stages_of(coordinates(self._topology, rank).pp)
            },
            recorder=recorder,
            session=session,
        )
        return _Rank(dispatcher, session, recorder, loop.time)

    def _is_first(self, rank: int) -> bool:
        return coordinates(self._topology, rank).pp == self._topology.rank_of(0)

    def _request(self, rank: int) -> StepRequest:
        microbatches = self._costs.microbatches
        args = (torch.empty(microbatches, 1),) if self._is_first(rank) else ()
        batch = Batch(args, {}, None, microbatches)
        return StepRequest(True, True, 0, 0, True, batch=lambda: _given(batch))


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank's dispatcher, and what it is recorded with."""

    dispatcher: Dispatcher
    session: Session
    recorder: Recorder
    clock: Clock

    async def run_step(self, request: StepRequest) -> StepReport:
        begun = self.clock()
        self.recorder.open_step(begun)
        try:
            report = await self.dispatcher.run_step(request)
        except BaseException as error:
            failed = error if isinstance(error, StepFailed) else self.session.failed(error)
            self.recorder.failed(failed, self.dispatcher.report_at_end)
            raise
        self.recorder.end_step(result_of(report, self.clock() - begun))
        return report


async def _given(value: T) -> T:
    return value


def _refuse_nesting() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise StateError(
        "an event loop is running here already: simulate outside it, or on another thread"
    )


def _allow_open_files(count: int) -> None:
    """Raise this process's own limit on open files, as far as it may."""
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextmanager
def _without_collection() -> Iterator[None]:
    """Millions of live objects and hardly a cycle: searching for those would take half the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

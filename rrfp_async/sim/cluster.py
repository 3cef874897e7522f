"""One step of a whole pipeline on the virtual cluster: real Dispatchers, virtual time.

Every rank has the Dispatcher, Session, bus and core that it has in a real run. It does not know
where the costs come from or what a result is compared with.
"""

import asyncio
import gc
import math
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from rrfp_async.bus.base import Bus
from rrfp_async.bus.inproc import InprocHub
from rrfp_async.config import Config
from rrfp_async.dispatcher import Dispatcher
from rrfp_async.errors import StateError, StepFailed
from rrfp_async.gpu.completion import Clock
from rrfp_async.gpu.loopback import LoopbackFabric
from rrfp_async.grid import coordinates, dp_group, tp_group
from rrfp_async.ids import TaskId
from rrfp_async.result import result_of
from rrfp_async.session import Session
from rrfp_async.sim.clock import VirtualLoop
from rrfp_async.sim.costs import Costs
from rrfp_async.sim.delayed_bus import DelayedBus
from rrfp_async.sim.lateness import PUNCTUAL, Lateness
from rrfp_async.sim.parts import CostModelDevice, CostModelStage, DelayedLoopback
from rrfp_async.sim.rendezvous import Rendezvous
from rrfp_async.sim.replicas import ReplicaTable, VirtualReplicas
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
    """The ranks of a pipeline, or of several columns of it, on one virtual clock.

    Ranks of a tensor-parallel group meet in every F, B and I: it begins when all have begun it, and
    takes all the same time. Waiting for the others is neither computing nor blocking; it is part of
    what agreeing costs. Averaging over replicas waits for all of them and takes no time.

    Args:
        costs: What tasks and transfers take; those between stages of one rank take nothing. For
            all replicas alike, or one for each. Ranks of a tensor-parallel group share theirs.
        topology: Whose stages they are; by default a chain, a stage on each rank.
        config: As for a real run; `microbatches` follows from the costs.
        dispatch_s: What it costs to dispatch a task, in seconds.
        lateness: What comes late beside what `costs` say.
        done: Called after every task.

    Raises:
        ValueError: If a listed hint breaks a rule, or costs do not fit the topology.
    """

    def __init__(
        self,
        costs: Costs | Sequence[Costs],
        config: Config,
        topology: Topology | None = None,
        *,
        dispatch_s: float = 0.0,
        lateness: Lateness = PUNCTUAL,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        if not 0.0 <= dispatch_s < math.inf:
            raise ValueError(
                f"dispatch cost {dispatch_s} must be a finite number of seconds of at least 0"
            )
        listed = (costs,) if isinstance(costs, Costs) else tuple(costs)
        self._topology = Topology(listed[0].stages) if topology is None else topology
        self._costs = costs_of_replicas(costs, self._topology)
        self._microbatches = listed[0].microbatches
        self._dispatch_s = dispatch_s
        self._lateness = lateness
        self._done = done
        self._config = replace(
            config,
            microbatches=self._microbatches,
            stall_timeout_s=2.0 * self._longest_s() + 1.0,
        )
        self._config.check_order(self._topology)
        self._config.check_agreement(self._topology)

    def _longest_s(self) -> float:
        """More than a step takes if one thing happens after the other."""
        tasks = 3 * self._topology.num_stages * self._microbatches
        late = self._lateness
        late_s = tasks * (late.skew_s + 4 * self._topology.tp * late.control_s)
        return max(costs.total_s for costs in self._costs) + tasks * self._dispatch_s + late_s

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
        shared = _Shared(self._topology)
        with ExitStack() as resources:
            cluster = [
                self._rank(rank, shared, resources) for rank in range(self._topology.world_size)
            ]
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

    def _rank(self, rank: int, shared: "_Shared", resources: ExitStack) -> "_Rank":
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        costs = self._costs_of(rank)
        bus: Bus = shared.hub.open(rank)
        if self._lateness.control_s:
            bus = DelayedBus(bus, self._lateness.control_s)
        resources.callback(bus.close)
        transfer = DelayedLoopback(shared.fabric, loop.time, self._lateness)
        wires = Wires(bus, transfer, replicas=shared.replicas(rank))
        device = CostModelDevice(
            costs,
            loop.time,
            dispatch_s=self._dispatch_s,
            done=self._done,
            meet=shared.meet(rank),
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
                stage: CostModelStage(stage, self._topology, costs, split=self._config.splits)
                for stage in self._topology.stages_of(coordinates(self._topology, rank).pp)
            },
            recorder=recorder,
            session=session,
        )
        return _Rank(dispatcher, session, recorder, loop.time)

    def _costs_of(self, rank: int) -> Costs:
        return self._costs[coordinates(self._topology, rank).dp]

    def _is_first(self, rank: int) -> bool:
        return coordinates(self._topology, rank).pp == self._topology.rank_of(0)

    def _request(self, rank: int) -> StepRequest:
        microbatches = self._microbatches
        args = (torch.empty(microbatches, 1),) if self._is_first(rank) else ()
        batch = Batch(args, {}, None, microbatches)
        return StepRequest(True, True, 0, 0, True, batch=lambda: _given(batch))


def costs_of_replicas(costs: Costs | Sequence[Costs], topology: Topology) -> tuple[Costs, ...]:
    """The costs of each replica.

    Raises:
        ValueError: If there are not as many as replicas, or they are not of the topology's stages
            and the same number of microbatches.
    """
    listed = (costs,) * topology.dp if isinstance(costs, Costs) else tuple(costs)
    if len(listed) != topology.dp:
        raise ValueError(
            f"{len(listed)} costs were given for dp={topology.dp} replicas: give one for each, or "
            f"one for all"
        )
    for one in listed:
        if one.stages != topology.num_stages:
            raise ValueError(
                f"costs are of {one.stages} stages, the topology has {topology.num_stages}: give "
                f"as many of both"
            )
        if one.microbatches != listed[0].microbatches:
            raise ValueError(
                f"replicas have {listed[0].microbatches} and {one.microbatches} microbatches: give "
                f"as many to each"
            )
    return listed


class _Shared:
    """What the ranks of a step share: mailboxes, links, and where groups meet."""

    def __init__(self, topology: Topology) -> None:
        self.hub, self.fabric = InprocHub(topology.world_size), LoopbackFabric()
        self._topology = topology
        ranks = range(topology.world_size)
        self._tp = {group: Rendezvous(group) for group in {tp_group(topology, r) for r in ranks}}
        self._dp = {
            group: ReplicaTable(len(group)) for group in {dp_group(topology, r) for r in ranks}
        }

    def meet(self, rank: int) -> Callable[[TaskId], Awaitable[None]] | None:
        """Waits, as `rank`, for its tensor-parallel group in a task; None where it is alone."""
        if self._topology.tp == 1:
            return None
        return partial(self._tp[tp_group(self._topology, rank)].enter, rank)

    def replicas(self, rank: int) -> VirtualReplicas | None:
        """The place of `rank` among its replicas; None where it has none."""
        if self._topology.dp == 1:
            return None
        group = dp_group(self._topology, rank)
        return VirtualReplicas(self._dp[group], group.index(rank))


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

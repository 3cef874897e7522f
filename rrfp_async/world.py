"""A world: bus, transfer, device and clock for one rank. The rest of the code is the same on all.

This file builds the twins of one process (`local_world`). It does not know what they are used for.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from rrfp_async.bus.base import Bus
from rrfp_async.bus.inproc import InprocHub
from rrfp_async.config import Config
from rrfp_async.errors import StateError
from rrfp_async.gpu.completion import Clock
from rrfp_async.gpu.delays import DelayedDevice, DelayedTransfer, Delays
from rrfp_async.gpu.device import Device, make_device
from rrfp_async.gpu.loopback import LoopbackFabric
from rrfp_async.gpu.loopback_replicas import ReplicaFabric
from rrfp_async.gpu.replicas import Replicas
from rrfp_async.gpu.transfer import Transfer
from rrfp_async.grid import Column, Coordinates, coordinates, dp_group
from rrfp_async.tasks.generators import Generators, shared_generators
from rrfp_async.topology import Topology
from rrfp_async.trace.recorder import Whose


@dataclass(frozen=True, slots=True)
class Wires:
    """A Runtime's connections to its peers.

    Attributes:
        bus: For messages.
        transfer: For tensors.
        replicas: For collectives among the replicas of the rank; None without any.
        store: A `torch.distributed.Store` of this Runtime's ranks alone; None where time is
            virtual. Checkpoints need it.
    """

    bus: Bus
    transfer: Transfer
    store: Any = None
    replicas: Replicas | None = None


class Connecting:
    """Opens wires on entering and closes them on leaving.

    A class, not an async generator: those that a program leaves open are closed by the loop at
    its end, all at once, and complain.
    """

    def __init__(self, start: Callable[[AsyncExitStack], Awaitable[Wires]]) -> None:
        self._start = start
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Wires:
        try:
            return await self._start(self._resources)
        except BaseException:
            await self._resources.aclose()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._resources.aclose()


Connect = Callable[[Config], AbstractAsyncContextManager[Wires]]


@dataclass(frozen=True, slots=True)
class World:
    """One rank's surroundings.

    Attributes:
        rank: This rank, from 0.
        topology: Stages and ranks, equal on every rank.
        device: Where this rank computes; shared by its Runtimes.
        clock: Seconds, monotonic.
        connect: Opens the wires of this rank's next Runtime, given its config. The n-th Runtimes
            of all ranks share theirs, so each rank must build its Runtimes in the same order.
        store: A `torch.distributed.Store` of this world that all its ranks reach, or None in one
            process.
        mesh: torch's `DeviceMesh` of the dimensions ("pp", "dp", "tp"), for `parallelize_module`
            and ZeroRedundancyOptimizer; None in one process, and where dp = tp = 1.
        end_collectives: Ends what a task of a failed step still waits for in the mesh's groups;
            blocks for a moment. None without a mesh.
        settle: On a virtual clock, waits until all that happens at this instant has happened; a
            choice is made only then. None where time is real.
        generators: torch's, as this process shares them.
        begins_together: Whether no rank computes before every rank has its batch: where ranks share
            a process, what one still draws for its batch must not meet another's streams.
        progress_every_s: How often at most a rank reports its progress, in seconds.
    """

    rank: int
    topology: Topology
    device: Device
    clock: Clock
    connect: Connect
    store: Any = None
    mesh: Any = None
    end_collectives: Callable[[], None] | None = None
    settle: Callable[[], Awaitable[None]] | None = None
    generators: Generators = field(default_factory=partial(Generators, shared=False))
    begins_together: bool = False
    progress_every_s: float = 5.0

    @property
    def called(self) -> str:
        """This rank in messages, with its replica where there are several."""
        replica = f" (replica {self.place.dp})" if self.topology.dp > 1 else ""
        return f"rank {self.rank}{replica}"

    @property
    def place(self) -> Coordinates:
        """Where this rank stands among pp x dp x tp."""
        return coordinates(self.topology, self.rank)

    @property
    def column(self) -> Column:
        """The pipeline that this rank's tensors travel in."""
        return Column.of(self.topology, self.rank)

    def whose(self, config: Config) -> Whose:
        """This rank as the records of its Runtime with `config` name it."""
        simulated = self.settle is not None
        return Whose(self.rank, self.topology, config, self.clock, simulated)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the device's thread end. Twice is harmless."""
        self.device.close()


def _hash_store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined] # torch's stubs leave it out


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the n-th Runtimes of all ranks of a process share."""

    hub: InprocHub
    fabric: LoopbackFabric = field(default_factory=LoopbackFabric)
    replicas: ReplicaFabric = field(default_factory=ReplicaFabric)
    store: Any = field(default_factory=_hash_store)


class _LocalWiring:
    """The hubs and fabrics of one process: one of each per Runtime number, made when first used."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._world_size = topology.world_size
        self._opened = [0] * topology.world_size
        self._shared: dict[int, _Shared] = {}
        self._ends_closed: Counter[int] = Counter()
        self._open: set[Bus] = set()
        self._closed = False

    def connect(self, rank: int, device: torch.device) -> Connecting:
        """The wires of the next Runtime of `rank`, whose tensors live on `device`."""
        return Connecting(partial(self._start, rank, device))

    async def _start(self, rank: int, device: torch.device, resources: AsyncExitStack) -> Wires:
        if self._closed:
            raise StateError("this local_world has been left: enter a new one")
        number = self._opened[rank]
        self._opened[rank] += 1
        if number not in self._shared:
            self._shared[number] = _Shared(InprocHub(self._world_size))
        shared = self._shared[number]
        bus = shared.hub.open(rank)
        self._open.add(bus)
        resources.callback(self._end, number, bus)
        replicas: Replicas | None = None
        if self._topology.dp > 1:
            group = dp_group(self._topology, rank)
            replicas = shared.replicas.open(group, rank, device, time.perf_counter)
            resources.callback(replicas.close)
        return Wires(bus, shared.fabric.open(device), shared.store, replicas)

    def _end(self, number: int, bus: Bus) -> None:
        """Close one end; after the last one of a Runtime, forget its hub and fabric."""
        self._open.discard(bus)
        bus.close()
        self._ends_closed[number] += 1
        if self._ends_closed[number] == self._world_size:
            del self._shared[number], self._ends_closed[number]

    def close(self) -> None:
        """Close what is open: a rank that still waits for a message gets an error instead."""
        self._closed = True
        for bus in self._open:
            bus.close()


@asynccontextmanager
async def local_world(
    n: int, topology: Topology | None = None, *, device: str = "cpu"
) -> AsyncIterator[list[World]]:
    """The worlds of `n` ranks in this process, on the running event loop.

    Each rank computes on a thread of its own, which ends with the context. A step that is running
    on some rank when the context is left fails there.

    Args:
        n: The number of ranks.
        topology: Their stages; by default a chain of `n` stages, one a rank.
        device: `"cpu"`, or `"cuda"`: then ranks are spread over the GPUs there are, each with a
            stream of its own.

    Raises:
        ValueError: If `n` is below 1 or does not fit the topology.
    """
    topology = Topology(n) if topology is None else topology
    if topology.world_size != n:
        raise ValueError(
            f"topology has {topology.world_size} ranks, n={n} were asked for: make them equal"
        )
    wiring = _LocalWiring(topology)
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    devices = [
        make_device(device, rank % max(gpus, 1), time.perf_counter, name=f"rrfp-compute-{rank}")
        for rank in range(n)
    ]
    try:
        yield [
            World(
                rank,
                topology,
                devices[rank],
                time.perf_counter,
                _connector(wiring, rank, devices[rank].torch_device),
                generators=shared_generators(),
                begins_together=True,
            )
            for rank in range(n)
        ]
    finally:
        wiring.close()
        for place in devices:
            place.close()


def _connector(wiring: _LocalWiring, rank: int, device: torch.device) -> Connect:
    return lambda _config: wiring.connect(rank, device)


def with_delays(world: World, delays: Delays) -> World:
    """The same world with seeded sleeps before sends and tasks, to shake up the order of things."""

    async def start(config: Config, resources: AsyncExitStack) -> Wires:
        wires = await resources.enter_async_context(world.connect(config))
        return dataclasses.replace(wires, transfer=DelayedTransfer(wires.transfer, delays))

    return dataclasses.replace(
        world,
        device=DelayedDevice(world.device, delays),
        connect=lambda config: Connecting(partial(start, config)),
    )

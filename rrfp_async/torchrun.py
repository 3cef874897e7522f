"""The world of one rank that torchrun started: ZeroMQ for control, a process group per link.

Reads torchrun's environment, and asks the machine which of its addresses leads to the master.
Opening a Runtime on it waits for every other rank, at most `config.peer_timeout_s`.
"""

import os
import socket
import time
from collections.abc import Mapping, MutableMapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from rrfp_async.bus.directory import Directory
from rrfp_async.bus.zeromq import Place, ZeroMqOpening
from rrfp_async.closing import surely
from rrfp_async.config import Config
from rrfp_async.gpu.completion import WaitingThread
from rrfp_async.gpu.device import make_device
from rrfp_async.gpu.group_replicas import GroupReplicas, open_replicas
from rrfp_async.gpu.group_transfer import GroupTransfer
from rrfp_async.gpu.links import Communicator, open_links
from rrfp_async.grid import Column, dp_group
from rrfp_async.ids import Link
from rrfp_async.mesh import StuckCollectives, device_mesh
from rrfp_async.topology import Topology
from rrfp_async.world import Connecting, Wires, World

_STORE_TIMEOUT_S = 60.0  # to reach torchrun's store, and for a key in it
_AFTER_THE_BUS_S = 2.0  # a rank that the bus cannot reach is named before its link gives up


@dataclass(frozen=True, slots=True)
class Launch:
    """What torchrun tells a process in its environment.

    Attributes:
        rank: This rank (RANK).
        world_size: The number of ranks (WORLD_SIZE).
        local_rank: The rank within this host (LOCAL_RANK).
        local_world_size: Ranks on this host (LOCAL_WORLD_SIZE).
        host: This host's number (GROUP_RANK).
        master: Address and port of the store (MASTER_ADDR, MASTER_PORT).
        restart: How often the job was restarted (TORCHELASTIC_RESTART_COUNT).
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: int
    master: tuple[str, int]
    restart: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Launch":
        """Read the variables.

        Raises:
            ValueError: If one is missing or no number.
        """

        def number(name: str, default: int | None = None) -> int:
            word = environment.get(name)
            if word is None and default is not None:
                return default
            if word is None or not word.isdecimal():
                raise ValueError(
                    f"environment variable {name} is {word!r}, not a number: start this program "
                    f"with torchrun, or use rrfp_async.local_world in one process"
                )
            return int(word)

        rank, world_size = number("RANK"), number("WORLD_SIZE")
        if rank >= world_size:
            raise ValueError(f"RANK={rank} must be below WORLD_SIZE={world_size}")
        return cls(
            rank,
            world_size,
            number("LOCAL_RANK", rank),
            number("LOCAL_WORLD_SIZE", world_size),
            number("GROUP_RANK", 0),
            (environment.get("MASTER_ADDR", "127.0.0.1"), number("MASTER_PORT")),
            number("TORCHELASTIC_RESTART_COUNT", 0),
        )

    def address(self) -> str:
        """The address of the interface that this host's peers reach.

        Raises:
            ValueError: If other hosts are to reach it and the master's name leads back to here.
        """
        if self.local_world_size == self.world_size:
            return "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(self.master)  # sends nothing: asks for the route
            address: str = probe.getsockname()[0]
        if address.startswith("127."):
            raise ValueError(
                f"MASTER_ADDR={self.master[0]} is a loopback address here, which other hosts "
                f"cannot reach: start torchrun with --local-addr IP on every host"
            )
        return address


def torchrun_world(topology: Topology | None = None, *, device: str = "cpu") -> World:
    """This process's world, from torchrun's environment.

    Use it as an async context manager, or keep it for the life of the process.

    Args:
        topology: The stages and ranks; by default a chain with one stage for each rank.
        device: `"cpu"`, with tensors over gloo, or `"cuda"`, with GPU LOCAL_RANK and NCCL.

    Raises:
        ValueError: If torchrun's variables are missing, or the number of ranks or the device does
            not fit.
    """
    launch = Launch.from_environment(os.environ)
    topology = Topology(launch.world_size) if topology is None else topology
    if topology.world_size != launch.world_size:
        raise ValueError(
            f"topology has {topology.world_size} ranks, torchrun started {launch.world_size}: "
            f"start with --nproc-per-node and --nnodes that multiply to {topology.world_size}"
        )
    if device == "cuda":
        _prepare_cuda(os.environ)
    place = make_device(device, launch.local_rank, time.perf_counter)
    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=_STORE_TIMEOUT_S))))
    try:
        wiring = _Wiring(launch, topology, store, place.torch_device)
        mesh = wiring.mesh()
    except BaseException:
        place.close()
        raise
    stuck = None if mesh is None else StuckCollectives(mesh, place)
    return World(
        launch.rank,
        topology,
        place,
        time.perf_counter,
        wiring.connect,
        wiring.own_store(),
        mesh,
        None if stuck is None else stuck.end,
    )


def _prepare_cuda(environment: MutableMapping[str, str]) -> None:
    """Settings that must stand before CUDA and NCCL start. Not yet run on a GPU.

    With streams that share a hardware queue, a transfer that waits for a peer would hold up the
    computation that the peer waits for. NCCL's own error handling would end the process before it
    can tell its peers the cause.
    """
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"):
        if environment.get(name) == "1":
            raise ValueError(
                f"{name}=1 makes streams wait for one another, which deadlocks a pipeline: unset it"
            )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
        raise ValueError(
            "CUDA was used before torchrun_world(device='cuda'), which sets it up: make the world "
            "first"
        )
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # torchrun sets 1 for every rank


def _worlds_before(launch: Launch, store: Any) -> int:
    """How many worlds this process has made: every rank makes its worlds in the same order.

    Counted for the process, not for the rank: a second process with a rank must be found out.
    """
    process = f"{launch.rank}/{socket.gethostname()}/{os.getpid()}"
    made: int = store.add(f"rrfp/{launch.restart}/worlds/{process}", 1)
    return made - 1


class _Wiring:
    """Connects the Runtimes of one process, each under keys of its own."""

    def __init__(
        self, launch: Launch, topology: Topology, store: Any, device: torch.device
    ) -> None:
        self._launch = launch
        self._host = launch.address()
        self._device = device
        self._topology = topology
        self._store = store
        self._keys = f"rrfp/{launch.restart}/{_worlds_before(launch, store)}"
        self._opened = 0

    def mesh(self) -> Any:
        """All ranks as torch's DeviceMesh; None where neither replicas nor TP need it."""
        topology = self._topology
        if topology.dp * topology.tp == 1:
            return None
        store = self._prefixed("mesh")
        rank, host = self._launch.rank, self._host
        return device_mesh(topology, rank=rank, store=store, host=host, device=self._device)

    def own_store(self) -> Any:
        """For the program: what it sets there for one world, no other world of the ranks finds."""
        return self._prefixed("program")

    def _prefixed(self, name: str) -> Any:
        return c10d.PrefixStore(f"{self._keys}/{name}", self._store)

    def connect(self, config: Config) -> Connecting:
        """The wires of the next Runtime of this process."""
        number = self._opened
        self._opened += 1
        return Connecting(partial(self._open, config, number))

    async def _open(self, config: Config, number: int, resources: AsyncExitStack) -> Wires:
        launch, timeout_s = self._launch, config.peer_timeout_s
        connection = self._store.clone()  # a client waits for one key at a time
        store = c10d.PrefixStore(f"{self._keys}/{number}", connection)
        port = config.port + launch.local_rank if config.port else 0
        place = Place(launch.rank, launch.world_size, self._host, launch.host, port)
        directory = Directory(
            store, rank=launch.rank, world_size=launch.world_size, timeout_s=timeout_s
        )
        opening = ZeroMqOpening(place, directory, peer_timeout_s=timeout_s)
        bus = await resources.enter_async_context(opening)
        async with directory.sharing_faults():
            groups, replicas = await directory.unless_fault(self._connect(store, timeout_s))
        transfer = GroupTransfer(
            groups, rank=launch.rank, device=self._device, clock=time.perf_counter
        )
        resources.push_async_callback(surely, transfer.close)
        if replicas is not None:
            resources.push_async_callback(surely, replicas.close)
        return Wires(bus, transfer, store, replicas)

    async def _connect(
        self, store: Any, timeout_s: float
    ) -> tuple[dict[Link, Communicator], GroupReplicas | None]:
        """Connect on a thread that an exit does not wait for: gloo blocks until the peers come."""
        thread = WaitingThread(time.perf_counter, name="rrfp-connect")
        try:
            return (await thread.submit(partial(self._open_groups, store, timeout_s))).value
        finally:
            thread.close()

    def _open_groups(
        self, store: Any, timeout_s: float
    ) -> tuple[dict[Link, Communicator], GroupReplicas | None]:
        """First every link, then the replicas: in one order on all ranks."""
        topology, rank = self._topology, self._launch.rank
        common: dict[str, Any] = {
            "rank": rank,
            "store": store,
            "host": self._host,
            "device": self._device,
            "timeout_s": timeout_s + _AFTER_THE_BUS_S,
        }
        links = open_links(Column.of(topology, rank).links(), **common)
        if topology.dp == 1:
            return links, None
        group = dp_group(topology, rank)
        return links, open_replicas(group, clock=time.perf_counter, **common)

"""All ranks as torch's DeviceMesh, for what users run on its groups.

That is `parallelize_module` over "tp" and ZeroRedundancyOptimizer over "dp". Over the program's
default process group if there is one, else over one made here. The Runtime's own tensors travel
over groups of their own: those that a failed step leaves waiting are cut off for good.
"""

import atexit
import os
import socket
import struct
import sys
import time
from collections.abc import MutableMapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rrfp_async.gpu.device import Device
from rrfp_async.topology import Topology

if sys.platform == "linux":
    import fcntl

DIMENSIONS = ("pp", "dp", "tp")
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface, from linux/sockios.h
_NAME_MOST = 15
_AT_ONCE = timedelta(milliseconds=1)
_UNUSED_TAG = 79
_ENDS_BY_ITSELF_S = 0.2
_LOOK_EVERY_S = 0.01
_LETS_GO_WITHIN_S = 0.2


def device_mesh(
    topology: Topology, *, rank: int, store: Any, host: str, device: torch.device
) -> Any:
    """The mesh; every rank makes it. Blocks until all ranks are there.

    Args:
        topology: Whose ranks they are.
        rank: This rank.
        store: For a default process group, if there is none.
        host: The address by which peers reach this rank.
        device: Where it computes: gloo serves the CPU, NCCL a GPU.

    Raises:
        ValueError: If a default process group has other ranks, or the address has no interface.
    """
    if device.type == "cpu":
        choose_interface(os.environ, host)
    if not dist.is_initialized():
        _init(topology, rank, store, device)
    elif (dist.get_rank(), dist.get_world_size()) != (rank, topology.world_size):
        raise ValueError(
            f"the default process group has this process as rank {dist.get_rank()} of "
            f"{dist.get_world_size()}, torchrun as {rank} of {topology.world_size}: initialise it "
            f"with all of torchrun's ranks, or leave that to torchrun_world()"
        )
    shape = (topology.pp, topology.dp, topology.tp)
    return init_device_mesh(device.type, shape, mesh_dim_names=DIMENSIONS)


def is_broken_collective(error: BaseException) -> bool:
    """Whether `error` is what torch raises in a collective whose other members may be gone."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)  # it has no class of its own
    )


class StuckCollectives:
    """Ends the collectives of the mesh's groups that a task of a failed step still waits in.

    Its peers will not come: their step has failed too. The groups are of no use afterwards, nor
    would they be otherwise, since their members may have entered different collectives.

    Args:
        mesh: The mesh.
        device: Where the tasks run.
    """

    def __init__(self, mesh: Any, device: Device) -> None:
        self._groups = [mesh.get_group(name) for name in DIMENSIONS[1:]]
        self._device = device
        atexit.register(self._at_exit)

    def end(self) -> None:
        """End them, if a task runs still after a moment. Blocks for about that."""
        deadline = time.monotonic() + _ENDS_BY_ITSELF_S
        while self._device.busy:
            if time.monotonic() > deadline:
                self._cut_off()
                return
            time.sleep(_LOOK_EVERY_S)

    def _at_exit(self) -> None:
        """A thread of gloo's that meets the interpreter's end takes the process down with it.

        It may do so when all is well: it drops a collective's tensors a moment after whoever waited
        for that went on. Nothing tells when it has.
        """
        self.end()
        time.sleep(_LETS_GO_WITHIN_S)

    def _cut_off(self) -> None:
        """See `GroupReplicas`: gloo has no abort, but a wait that times out closes its pair."""
        for group in self._groups:
            for peer in range(group.size()):
                if peer != group.rank():
                    with suppress(RuntimeError):
                        if self._device.torch_device.type == "cuda":  # not yet run on a GPU
                            group.abort()
                        else:
                            group.recv([torch.zeros(1)], peer, _UNUSED_TAG).wait(_AT_ONCE)


def _init(topology: Topology, rank: int, store: Any, device: torch.device) -> None:
    """Make the default process group. Over NCCL not yet run."""
    backend, gpu = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=topology.world_size, device_id=gpu
    )


def choose_interface(environment: MutableMapping[str, str], host: str) -> None:
    """Let gloo use the interface that has the address `host`, unless it was told another.

    Its own choice is the one that this host's name leads to, often a loopback, which no other host
    reaches. Elsewhere than on Linux that choice stays.

    Raises:
        ValueError: If there is none.
    """
    if _INTERFACE in environment or sys.platform != "linux":
        return
    for _, name in socket.if_nameindex():
        if _address_of(name) == host:
            environment[_INTERFACE] = name
            return
    raise ValueError(
        f"no interface here has the address {host}: set {_INTERFACE} to the name of the one by "
        f"which other hosts reach this one"
    )


def _address_of(interface: str) -> str | None:
    """Its first IPv4 address, if it has one."""
    asked = struct.pack("256s", interface.encode()[:_NAME_MOST])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            told = fcntl.ioctl(probe, _SIOCGIFADDR, asked)
        except OSError:
            return None
    return socket.inet_ntoa(told[20:24])

"""The communicators of a rank: one process group of two members per directed link.

A process group is built directly over a store prefixed with its link's name, by its two members
only. All ranks go through the links in one global order, so every pair meets at the same one.
Groups made by `torch.distributed.new_group` would need every rank for each of them.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from rrfp_async.errors import TransferError
from rrfp_async.ids import Link

_SENDER, _RECEIVER = 0, 1
_CTAS_MOST = 4
_FOREVER = timedelta(days=1)


class Communicator(Protocol):
    """What is used of a process group of two."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """Start a send to member `peer`; returns torch's `Work`."""

    def abort(self) -> None:
        """Give up what is open, on a group that can."""

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """Start a receive from member `peer`; returns torch's `Work`."""


def open_links(
    links: Sequence[Link],
    *,
    rank: int,
    store: Any,
    host: str,
    device: torch.device,
    timeout_s: float,
) -> dict[Link, Communicator]:
    """Connect every link of `rank`, over gloo or NCCL; blocks until the other ends are there.

    Args:
        links: All links of the run, equal and equally ordered on every rank.
        rank: This rank.
        store: A `torch.distributed.Store` shared by all ranks; keys are private to this Runtime.
        host: The address of this rank's interface that its peers reach.
        device: Where tensors live: gloo serves the CPU, NCCL a GPU.
        timeout_s: How long the other end of a link may take, in seconds.

    Raises:
        TransferError: If a link cannot be connected in time, naming it.
    """
    groups = {}
    gloo_devices: list[Any] = []  # one for all links: each is a thread that polls
    for link in links:
        if rank in (link.source, link.target):
            try:
                member = _SENDER if rank == link.source else _RECEIVER
                prefixed = c10d.PrefixStore(f"link/{link.source}-{link.target}", store)
                groups[link] = (
                    _nccl(prefixed, member, device)
                    if device.type == "cuda"
                    else _gloo(prefixed, member, host, timeout_s, gloo_devices)
                )
            except (RuntimeError, ValueError) as error:
                raise TransferError(
                    f"rank {rank} cannot connect link {link} from {host} within {timeout_s} s: "
                    f"{error}"
                ) from error
    return groups


def peer_of(link: Link, rank: int) -> int:
    """The number of the other member in the link's group: the sender is 0, the receiver 1."""
    return _RECEIVER if rank == link.source else _SENDER


def _nccl(store: Any, member: int, device: torch.device) -> Communicator:
    """An NCCL communicator, connected by a first transfer. Not yet run on a GPU.

    Its watchdog never acts on time: a peer that is gone is found by the bus, and a process that
    NCCL ends could not say why. Thread block use per transfer is bounded, or sends and receives
    that wait for one another could fill the device.
    """
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _FOREVER
    options.config.max_ctas = _CTAS_MOST
    group: Communicator = nccl(store, member, 2, options)
    first = torch.zeros(1, device=device)
    start = group.send if member == _SENDER else group.recv
    start([first], 1 - member, 0).wait()
    torch.cuda.synchronize(device)
    return group


def _gloo(store: Any, member: int, host: str, timeout_s: float, devices: list[Any]) -> Communicator:
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave out the options
    if not devices:
        devices.append(gloo.create_device(hostname=host))
    options = gloo._Options()
    options._devices = devices
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    group: Communicator = gloo(store, member, 2, options)
    return group

"""Tensor transfers as awaitables. Twins: `loopback` (one process), `group_transfer` (gloo, NCCL).

Sends are rendezvous: they end when the receiver has the tensors. The receiver is told first, by a
header on the bus, what comes; a transfer knows only links, numbers and specs.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rrfp_async.errors import TransferError
from rrfp_async.ids import Link, TensorSpec


@dataclass(frozen=True, slots=True)
class TransferStatistics:
    """Sends and receives that have begun and not ended, and all that ended, of one rank."""

    open_sends: int
    open_receives: int
    completed: int


class Transfer(ABC):
    """One rank's end of its links."""

    @abstractmethod
    def export(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to hand to `send`: detached, contiguous, any shape and dtype.

        Called on the compute thread, in the task that made the tensor, once per receiver.
        """

    def pack(self, tensors: Sequence[torch.Tensor]) -> bytes | None:  # noqa: ARG002 - a default
        """The bytes of `tensors`, if they are to travel with their header; else None.

        Called on the event loop right after the task that made them.
        """
        return None

    @abstractmethod
    async def send(self, link: Link, sequence: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send `tensors` as number `sequence` on `link`; returns once the receiver has them.

        Cancelling leaves the receiver without them: it is for failed steps only.
        """

    @abstractmethod
    async def receive(
        self, link: Link, sequence: int, specs: Sequence[TensorSpec]
    ) -> list[torch.Tensor]:
        """The tensors of number `sequence` on `link`, one per spec, of that shape and dtype.

        They start on a 64-byte boundary of memory that torch allocated, and no one else has them.

        Raises:
            TransferError: If what came differs from `specs`.
        """

    @abstractmethod
    def statistics(self) -> TransferStatistics:
        """A snapshot of the counters."""


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """What a header says of `tensor`."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(tuple(tensor.shape), dtype, tensor.requires_grad)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The element type that a header named.

    Raises:
        TransferError: If torch has none of that name.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise TransferError(f"a header announced the dtype {spec.dtype!r}, which torch has not")
    return dtype


def packed(tensors: Sequence[torch.Tensor]) -> bytes:
    """The elements of contiguous CPU tensors, one tensor after another."""
    return b"".join(ctypes.string_at(tensor.data_ptr(), tensor.nbytes) for tensor in tensors)


def unpacked(payload: bytes, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """The tensors that `packed` was given, each in memory of its own.

    Raises:
        TransferError: If there are more or fewer bytes than `specs` announce.
    """
    tensors = [torch.empty(spec.shape, dtype=dtype_of(spec)) for spec in specs]
    announced = sum(tensor.nbytes for tensor in tensors)
    if announced != len(payload):
        raise TransferError(f"a header brought {len(payload)} bytes and announced {announced}")
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        ctypes.memmove(tensor.data_ptr(), payload[begin:end], tensor.nbytes)
        begin = end
    return tensors

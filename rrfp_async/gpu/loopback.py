"""Transfers between ranks of one process: what is sent is copied, and sends are rendezvous.

The copy is made by `export`, on the sender's compute thread and before its next task can touch
the original, so a stage that reuses its output buffer cannot reach into what it sent. From then
on the copy belongs to the receiver. Aliasing instead would hide what real links show.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rrfp_async.errors import TransferError
from rrfp_async.gpu.transfer import Transfer, TransferStatistics, dtype_of
from rrfp_async.ids import Link, TensorSpec

_CPU = torch.device("cpu")


@dataclass(slots=True)
class _Meeting:
    """Where the two ends of one transfer find each other, whichever comes first."""

    offered: "asyncio.Future[list[torch.Tensor]]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    taken: asyncio.Event = field(default_factory=asyncio.Event)


class LoopbackFabric:
    """The links of one process. Each rank opens its own end."""

    def __init__(self) -> None:
        self._meetings: dict[tuple[Link, int], _Meeting] = {}

    def open(self, device: torch.device = _CPU) -> "LoopbackTransfer":
        """The end of a rank whose tensors live on `device`."""
        return LoopbackTransfer(self, device)

    def meet(self, link: Link, sequence: int) -> _Meeting:
        """The meeting of one transfer, made by the end that comes first."""
        return self._meetings.setdefault((link, sequence), _Meeting())

    def part(self, link: Link, sequence: int) -> None:
        """Forget a meeting: one end has left it."""
        self._meetings.pop((link, sequence), None)

    @property
    def open_meetings(self) -> int:
        """Transfers that have begun and not ended."""
        return len(self._meetings)


class LoopbackTransfer(Transfer):
    """One rank's end of a `LoopbackFabric`."""

    def __init__(self, fabric: LoopbackFabric, device: torch.device) -> None:
        self._fabric = fabric
        self._device = device
        self._open_sends = 0
        self._open_receives = 0
        self._completed = 0

    def export(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of its own."""
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    async def send(self, link: Link, sequence: int, tensors: Sequence[torch.Tensor]) -> None:
        """Offer the tensors and wait until the receiver has taken them."""
        meeting = self._fabric.meet(link, sequence)
        if meeting.offered.done():
            raise TransferError(f"number {sequence} on link {link} was sent twice")
        self._open_sends += 1
        try:
            meeting.offered.set_result(list(tensors))
            await meeting.taken.wait()
            self._completed += 1
        finally:
            self._open_sends -= 1
            self._fabric.part(link, sequence)

    async def receive(
        self, link: Link, sequence: int, specs: Sequence[TensorSpec]
    ) -> list[torch.Tensor]:
        """Take what the sender offers, once it is what the header announced."""
        meeting = self._fabric.meet(link, sequence)
        self._open_receives += 1
        try:
            tensors = await meeting.offered
            _check(link, sequence, tensors, specs)
            meeting.taken.set()
            self._completed += 1
            return [tensor.data.to(self._device) for tensor in tensors]  # with counters of its own
        finally:
            self._open_receives -= 1
            if not meeting.taken.is_set():
                self._fabric.part(link, sequence)

    def statistics(self) -> TransferStatistics:
        """A snapshot of the counters."""
        return TransferStatistics(self._open_sends, self._open_receives, self._completed)


def _check(
    link: Link, sequence: int, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]
) -> None:
    came = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    announced = [(spec.shape, dtype_of(spec)) for spec in specs]
    if came != announced:
        raise TransferError(
            f"number {sequence} on link {link} brought {came}, its header announced {announced}"
        )

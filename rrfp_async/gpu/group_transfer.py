"""Transfers over process groups: gloo between CPUs.

Each link has a thread per end that posts and waits, one transfer after another: gloo's sends block
for milliseconds, and its work never reports completion by itself. Order on a link is the sequence
number, whatever order `send` and `receive` are awaited in.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch

from rrfp_async.errors import TransferError
from rrfp_async.gpu.completion import Clock, WaitingThread
from rrfp_async.gpu.links import Communicator, peer_of
from rrfp_async.gpu.transfer import Transfer, TransferStatistics
from rrfp_async.ids import Link, TensorSpec

_FOREVER = timedelta(days=1)  # a peer that is gone is found by the bus, which ends the step


class _Turns:
    """Lets number n through after number n - 1, whatever order they come in."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, asyncio.Event] = {}

    async def wait(self, sequence: int) -> None:
        """Wait until it is the turn of `sequence`."""
        if sequence != self._next:
            await self._waiting.setdefault(sequence, asyncio.Event()).wait()

    def advance(self) -> None:
        """Give the turn to the next number."""
        self._next += 1
        if event := self._waiting.pop(self._next, None):
            event.set()


class _End:
    """This rank's end of one link: its thread and its turns."""

    def __init__(self, link: Link, rank: int, group: Communicator, clock: Clock) -> None:
        self.peer = peer_of(link, rank)
        self.group = group
        self._thread = WaitingThread(clock, name=f"rrfp-link-{link}")
        self._turns = _Turns()

    async def run(self, sequence: int, job: Callable[[], None]) -> None:
        """Run `job` on the link's thread as number `sequence`."""
        await self._turns.wait(sequence)
        done = self._thread.submit(job)
        self._turns.advance()
        await done

    def close(self) -> None:
        self._thread.close()


class GroupTransfer(Transfer):
    """One rank's end of its links over process groups from `links.open_links`."""

    def __init__(self, groups: Mapping[Link, Communicator], *, rank: int, clock: Clock) -> None:
        self._ends = {link: _End(link, rank, group, clock) for link, group in groups.items()}
        self._open_sends = 0
        self._open_receives = 0
        self._completed = 0

    def export(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself where it is contiguous, else a contiguous copy."""
        return tensor.detach().contiguous()

    async def send(self, link: Link, sequence: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send on the link's thread; see `Transfer.send`."""
        end = self._ends[link]

        def post() -> None:
            for tensor in _with_bytes(tensors):
                end.group.send([tensor], end.peer, 0).wait(_FOREVER)

        self._open_sends += 1
        try:
            await end.run(sequence, post)
            self._completed += 1
        except RuntimeError as error:
            raise TransferError(f"number {sequence} on link {link} was cut off: {error}") from error
        finally:
            self._open_sends -= 1

    async def receive(
        self, link: Link, sequence: int, specs: Sequence[TensorSpec]
    ) -> list[torch.Tensor]:
        """Receive on the link's thread into buffers of exactly the announced size."""
        end = self._ends[link]
        buffers = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs]

        def post() -> None:
            for buffer in _with_bytes(buffers):
                end.group.recv([buffer], end.peer, 0).wait(_FOREVER)

        self._open_receives += 1
        try:
            await end.run(sequence, post)
            self._completed += 1
        except RuntimeError as error:
            raise TransferError(f"number {sequence} on link {link} was cut off: {error}") from error
        finally:
            self._open_receives -= 1
        return buffers

    def statistics(self) -> TransferStatistics:
        """A snapshot of the counters."""
        return TransferStatistics(self._open_sends, self._open_receives, self._completed)

    def close(self) -> None:
        """Let the threads end. One that waits for a peer that is gone stays behind, a daemon."""
        for end in self._ends.values():
            end.close()


def _with_bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.numel()]

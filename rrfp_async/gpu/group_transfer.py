"""Transfers over process groups: gloo between CPUs, NCCL between GPUs.

Each link has a thread per end that posts and waits, one transfer after another: gloo's sends block
for milliseconds, and its work never reports completion by itself. NCCL's is enqueued on a stream
of the link, which the thread then waits for; the header is on its way to the receiver by then, so a
kernel spins no longer than the receiver takes to post. Order on a link is the sequence
number, whatever order `send` and `receive` are awaited in.
"""

import asyncio
import atexit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from rrfp_async.errors import TransferError
from rrfp_async.gpu.completion import Clock, WaitingThread
from rrfp_async.gpu.links import Communicator, peer_of
from rrfp_async.gpu.transfer import Transfer, TransferStatistics, dtype_of, packed
from rrfp_async.ids import Link, TensorSpec

_AT_ONCE = timedelta(milliseconds=1)
_UNUSED_TAG = 77
_IDLE_JOIN_S = 0.02
_JOIN_S = 0.5

PACKED_MOST_BYTES = 65_536
"""Tensors of an edge up to 64 KiB in all travel with their header."""
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

    def __init__(
        self, link: Link, rank: int, group: Communicator, device: torch.device, clock: Clock
    ) -> None:
        self._peer = peer_of(link, rank)
        self._group = group
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's
        self._thread = WaitingThread(clock, name=f"rrfp-link-{link}")
        self._turns = _Turns()

    async def send(self, sequence: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send as number `sequence`."""
        await self._run(sequence, partial(self._post, self._group.send, tensors))

    async def receive(self, sequence: int, buffers: Sequence[torch.Tensor]) -> None:
        """Fill `buffers` with number `sequence`."""
        await self._run(sequence, partial(self._post, self._group.recv, buffers))

    async def _run(self, sequence: int, job: Callable[[], None]) -> None:
        await self._turns.wait(sequence)
        done = self._thread.submit(job)
        self._turns.advance()
        await done

    def _post(self, start: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> None:
        """Post and wait, on the link's thread. Tensors without elements travel by their spec."""
        filled = [tensor for tensor in tensors if tensor.numel()]
        if self._stream is None:
            for tensor in filled:
                start([tensor], self._peer, 0).wait(_FOREVER)
            return
        with torch.cuda.stream(self._stream):
            for tensor in filled:
                start([tensor], self._peer, 0).wait()  # the stream's wait, not the thread's
            done: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch's
            done.record(self._stream)
        done.synchronize()

    def close(self) -> None:
        """End the thread; one that waits for a peer is freed first."""
        self._thread.close()
        if not self._thread.join(_IDLE_JOIN_S):
            self._cut_off()
            self._thread.join(_JOIN_S)

    def _cut_off(self) -> None:
        """Make the process group give the link up, which ends every wait on it.

        gloo has no abort; but a wait that times out closes its pair for good, whatever it was for.
        """
        with suppress(RuntimeError):
            if self._stream is not None:
                self._group.abort()
                return
            self._group.recv([torch.zeros(1)], self._peer, _UNUSED_TAG).wait(_AT_ONCE)


class GroupTransfer(Transfer):
    """One rank's end of its links over process groups from `links.open_links`."""

    def __init__(
        self,
        groups: Mapping[Link, Communicator],
        *,
        rank: int,
        device: torch.device,
        clock: Clock,
    ) -> None:
        self._device = device
        self._ends = {
            link: _End(link, rank, group, device, clock) for link, group in groups.items()
        }
        self._open_sends = 0
        self._open_receives = 0
        self._completed = 0
        atexit.register(self.close)  # a thread inside gloo must not meet the interpreter's end

    def export(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy, or the tensor itself if it is large and its memory what it shows.

        A small one may be packed only when the stage's next task writes to its buffer already.
        """
        exported = tensor.detach().resolve_conj().resolve_neg().contiguous()
        copies = self._device.type == "cpu" and tensor.nbytes <= PACKED_MOST_BYTES
        return exported.clone() if copies else exported

    def pack(self, tensors: Sequence[torch.Tensor]) -> bytes | None:
        """Small CPU tensors travel with their header: no thread, no second way."""
        if self._device.type != "cpu" or sum(t.nbytes for t in tensors) > PACKED_MOST_BYTES:
            return None
        return packed(tensors)

    async def send(self, link: Link, sequence: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send on the link's thread; see `Transfer.send`."""
        self._open_sends += 1
        try:
            with _naming(link, sequence):
                await self._ends[link].send(sequence, tensors)
        finally:
            self._open_sends -= 1
        self._completed += 1

    async def receive(
        self, link: Link, sequence: int, specs: Sequence[TensorSpec]
    ) -> list[torch.Tensor]:
        """Receive on the link's thread into buffers of exactly the announced size."""
        buffers = [
            torch.empty(spec.shape, dtype=dtype_of(spec), device=self._device) for spec in specs
        ]
        self._open_receives += 1
        try:
            with _naming(link, sequence):
                await self._ends[link].receive(sequence, buffers)
        finally:
            self._open_receives -= 1
        self._completed += 1
        return buffers

    def statistics(self) -> TransferStatistics:
        """A snapshot of the counters."""
        return TransferStatistics(self._open_sends, self._open_receives, self._completed)

    def close(self) -> None:
        """End the links' threads, within half a second each; twice is harmless. Blocks."""
        atexit.unregister(self.close)
        for end in self._ends.values():
            end.close()


@contextmanager
def _naming(link: Link, sequence: int) -> Iterator[None]:
    """Turn what a process group raises into an error that names the transfer."""
    try:
        yield
    except RuntimeError as error:
        raise TransferError(f"number {sequence} on link {link} was cut off: {error}") from error

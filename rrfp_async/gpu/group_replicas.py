"""Collectives between replicas over process groups: gloo between CPUs, NCCL between GPUs.

The groups are a Runtime's own, built over its store by the members only, like a link's: closing
one that waits cuts it off for good, which must not reach what others use. One thread posts and
waits, in the order of the calls. Words travel over gloo also between GPUs, and before the sums: a
rank that has them all knows that its replicas are about to launch the same kernels.
"""

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from rrfp_async.errors import TransferError
from rrfp_async.gpu.completion import Clock, WaitingThread
from rrfp_async.gpu.replicas import Replicas

_AT_ONCE = timedelta(milliseconds=1)
_FOREVER = timedelta(days=1)  # a replica that is gone is found by the bus, which ends the step
_UNUSED_TAG = 78
_IDLE_JOIN_S = 0.02
_JOIN_S = 0.5
_CTAS_MOST = 8


def open_replicas(
    ranks: Sequence[int],
    *,
    rank: int,
    store: Any,
    host: str,
    device: torch.device,
    timeout_s: float,
    clock: Clock,
) -> "GroupReplicas":
    """Connect `rank` with the others of `ranks`; blocks until all of them are there.

    Args:
        ranks: The replicas in rank order.
        rank: This rank.
        store: A `torch.distributed.Store` shared by all; keys are private to this Runtime.
        host: The address of this rank's interface that its peers reach.
        device: Where tensors live: gloo serves the CPU, NCCL a GPU.
        timeout_s: How long the others may take, in seconds.
        clock: The world's.

    Raises:
        TransferError: If they do not connect in time.
    """
    place = list(ranks).index(rank)
    prefixed = c10d.PrefixStore(f"replicas/{ranks[0]}", store)
    try:
        words = _gloo(prefixed, place, len(ranks), host, timeout_s)
        sums = words if device.type == "cpu" else _nccl(prefixed, place, len(ranks), device)
    except (RuntimeError, ValueError) as error:
        raise TransferError(
            f"rank {rank} cannot connect with replicas {list(ranks)} from {host} within "
            f"{timeout_s} s: {error}"
        ) from error
    return GroupReplicas(words, sums, place=place, size=len(ranks), device=device, clock=clock)


def _gloo(store: Any, place: int, size: int, host: str, timeout_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave out the options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return gloo(c10d.PrefixStore("gloo", store), place, size, options)


def _nccl(store: Any, place: int, size: int, device: torch.device) -> Any:
    """An NCCL communicator, connected by a first sum. Not yet run on a GPU."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _FOREVER
    options.config.max_ctas = _CTAS_MOST
    group = nccl(c10d.PrefixStore("nccl", store), place, size, options)
    group.allreduce([torch.zeros(1, device=device)], c10d.AllreduceOptions()).wait()
    torch.cuda.synchronize(device)
    return group


class GroupReplicas(Replicas):
    """One rank's end of its process groups."""

    def __init__(
        self,
        words: Any,
        sums: Any,
        *,
        place: int,
        size: int,
        device: torch.device,
        clock: Clock,
    ) -> None:
        self._words = words
        self._sums = sums
        self._place = place
        self._size = size
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's
        self._thread = WaitingThread(clock, name="rrfp-replicas")
        self._closed = False
        atexit.register(self.close)  # a thread inside gloo must not meet the interpreter's end

    @property
    def size(self) -> int:
        """The size of the groups."""
        return self._size

    async def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum up in place, on the thread."""
        with _naming("a sum"):
            await self._thread.submit(partial(self._all_reduce, tensor))
        return tensor

    async def gather(self, words: Sequence[int]) -> list[tuple[int, ...]]:
        """Exchange them on the thread, on the CPU."""
        with _naming("an exchange of words"):
            return (await self._thread.submit(partial(self._all_gather, words))).value

    def close(self) -> None:
        """End the thread; one that waits for a replica is freed first. Blocks so long."""
        atexit.unregister(self.close)
        if self._closed:
            return
        self._closed = True
        self._thread.close()
        if not self._thread.join(_IDLE_JOIN_S):
            self._cut_off()
            self._thread.join(_JOIN_S)

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        options = c10d.AllreduceOptions()
        options.timeout = _FOREVER
        if self._stream is None:
            self._sums.allreduce([tensor], options).wait(_FOREVER)
            return
        with torch.cuda.stream(self._stream):
            self._sums.allreduce([tensor], options).wait()  # the stream's wait, not the thread's
            done: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch's
            done.record(self._stream)
        done.synchronize()

    def _all_gather(self, words: Sequence[int]) -> list[tuple[int, ...]]:
        own = torch.tensor(list(words), dtype=torch.int64)
        everyone = [torch.empty_like(own) for _ in range(self._size)]
        options = c10d.AllgatherOptions()  # type: ignore[attr-defined] # torch's stubs leave it out
        options.timeout = _FOREVER
        self._words.allgather([everyone], [own], options).wait(_FOREVER)
        return [tuple(each.tolist()) for each in everyone]

    def _cut_off(self) -> None:
        """Make the groups give up, which ends every wait on them.

        gloo has no abort; but a wait that times out closes its pair for good, whatever it was for.
        """
        if self._stream is not None:
            with suppress(RuntimeError):
                self._sums.abort()
        for peer in range(self._size):
            if peer != self._place:
                with suppress(RuntimeError):
                    self._words.recv([torch.zeros(1)], peer, _UNUSED_TAG).wait(_AT_ONCE)


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn what a process group raises into an error that says what was cut off."""
    try:
        yield
    except RuntimeError as error:
        raise TransferError(f"{what} over the replicas was cut off: {error}") from error

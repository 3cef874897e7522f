"""Collectives between replicas in one process: each takes all tensors and adds them in rank order.

So the bits do not depend on who came first. What a replica gave stays as it is until all have
added it up; each has a sum of its own.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from rrfp_async.errors import TransferError
from rrfp_async.gpu.completion import Clock, WaitingThread
from rrfp_async.gpu.replicas import Replicas


@dataclass(slots=True)
class _Meeting:
    """What replicas have brought to one collective, by dp rank."""

    brought: dict[int, Any] = field(default_factory=dict)
    left: int = 0
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    broken: bool = False


class ReplicaFabric:
    """The meetings of all groups of replicas in one process. Each rank opens its own end."""

    def __init__(self) -> None:
        self._meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}

    def open(
        self, group: tuple[int, ...], rank: int, device: torch.device, clock: Clock
    ) -> "LoopbackReplicas":
        """The end of `rank`, one of `group`, whose tensors live on `device`."""
        return LoopbackReplicas(self, group, rank, device, clock)

    def meet(self, group: tuple[int, ...], number: int) -> _Meeting:
        """The meeting of one collective, made by the replica that comes first."""
        return self._meetings.setdefault((group, number), _Meeting())

    def part(self, group: tuple[int, ...], number: int) -> None:
        """Note that a replica has left; after the last one the meeting is forgotten."""
        meeting = self._meetings[group, number]
        meeting.left += 1
        if meeting.left == len(meeting.brought):
            del self._meetings[group, number]

    def break_off(self, group: tuple[int, ...]) -> None:
        """End what waits in `group`: a replica has closed its end."""
        for (of_group, _), meeting in self._meetings.items():
            if of_group == group and not meeting.complete.is_set():
                meeting.broken = True
                meeting.complete.set()

    @property
    def open_meetings(self) -> int:
        """Collectives that have begun and not ended."""
        return len(self._meetings)


class LoopbackReplicas(Replicas):
    """One rank's end of a `ReplicaFabric`."""

    def __init__(
        self,
        fabric: ReplicaFabric,
        group: tuple[int, ...],
        rank: int,
        device: torch.device,
        clock: Clock,
    ) -> None:
        self._fabric = fabric
        self._group = group
        self._place = group.index(rank)
        self._device = device
        self._thread = WaitingThread(clock, name=f"rrfp-replicas-{rank}")
        self._done = 0

    @property
    def size(self) -> int:
        """The size of the group."""
        return len(self._group)

    async def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up all tensors, beside the loop, once the last one is there."""
        number, meeting = await self._met(tensor)
        try:
            parts = [meeting.brought[place] for place in range(self.size)]
            return (await self._thread.submit(partial(self._added, parts))).value
        finally:
            self._fabric.part(self._group, number)

    async def gather(self, words: Sequence[int]) -> list[tuple[int, ...]]:
        """Hand round the words."""
        number, meeting = await self._met(tuple(words))
        self._fabric.part(self._group, number)
        return [meeting.brought[place] for place in range(self.size)]

    def close(self) -> None:
        """End the thread; replicas that wait for this one are told."""
        if not self._thread.closed:
            self._fabric.break_off(self._group)
            self._thread.close()

    async def _met(self, brought: Any) -> tuple[int, _Meeting]:
        number, self._done = self._done, self._done + 1
        meeting = self._fabric.meet(self._group, number)
        meeting.brought[self._place] = brought
        if len(meeting.brought) == self.size:
            meeting.complete.set()
        try:
            await meeting.complete.wait()
        except asyncio.CancelledError:
            self._fabric.part(self._group, number)
            raise
        if meeting.broken:
            self._fabric.part(self._group, number)
            raise TransferError(f"replicas {self._group} were cut off: one has closed its end")
        return number, meeting

    def _added(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """On the thread, the sum in rank order, in memory of its own, complete on the device."""
        first, *others = parts
        total = first.to(self._device, copy=True)
        for other in others:
            total += other.to(self._device)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return total

"""Collectives among replicas on the virtual clock: they end when the last replica has come.

They take no time of their own: how long a sum over replicas would take, the cost model does not
say. What the tensors are is not known here.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rrfp_async.gpu.replicas import Replicas


@dataclass(slots=True)
class _Meeting:
    """What replicas have brought to one collective, by place."""

    brought: dict[int, Any] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class ReplicaTable:
    """Where `size` replicas of a rank meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._meetings: dict[int, _Meeting] = {}

    async def meet(self, place: int, number: int, brought: Any) -> list[Any]:
        """What every replica brings to collective `number`, by place, once all are there."""
        meeting = self._meetings.setdefault(number, _Meeting())
        meeting.brought[place] = brought
        if len(meeting.brought) == self.size:
            del self._meetings[number]
            meeting.complete.set()
        await meeting.complete.wait()
        return [meeting.brought[other] for other in range(self.size)]


class VirtualReplicas(Replicas):
    """The end of the replica with that place at the table."""

    def __init__(self, table: ReplicaTable, place: int) -> None:
        self._table = table
        self._place = place
        self._done = 0

    @property
    def size(self) -> int:
        """The replicas at the table."""
        return self._table.size

    async def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up all tensors in the replicas' order."""
        first, *others = await self._meet(tensor)
        total: torch.Tensor = first.clone()
        for other in others:
            total += other
        return total

    async def gather(self, words: Sequence[int]) -> list[tuple[int, ...]]:
        """Hand round the words."""
        return await self._meet(tuple(words))

    def close(self) -> None:
        """Nothing runs outside the loop."""

    async def _meet(self, brought: Any) -> list[Any]:
        number, self._done = self._done, self._done + 1
        return await self._table.meet(self._place, number, brought)

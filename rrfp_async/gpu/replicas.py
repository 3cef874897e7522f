"""Collectives among the replicas of a rank, as awaitables: sums, and small numbers exchanged.

Twins: `loopback_replicas` (one process), `group_replicas` (gloo, NCCL). All replicas make the same
calls in the same order. What the tensors are, and when they are ready, is not known here.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class Replicas(ABC):
    """One rank's place among those that hold copies of the same parameters."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many there are, this rank among them."""

    @abstractmethod
    async def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of every replica's `tensor`, equal to the bit on all of them.

        Args:
            tensor: Contiguous, on the rank's device, complete there, of the same shape and dtype
                on every replica. It is given away: the sum may be in its memory.

        Raises:
            TransferError: If a replica is gone or this end was closed.

        Cancelling leaves the others without it: it is for failed steps only.
        """

    @abstractmethod
    async def gather(self, words: Sequence[int]) -> list[tuple[int, ...]]:
        """Every replica's `words`, by dp rank; as many 64-bit ints on each. Otherwise as `sum`.

        Whoever has them all knows that every replica has come here.
        """

    @abstractmethod
    def close(self) -> None:
        """End what waits, within about half a second. Twice is harmless. May block so long."""

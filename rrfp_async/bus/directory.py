"""How ranks find one another: a key-value store that all of them reach.

Each rank enters a card (its addresses and public key) and collects everyone's. A rank that cannot
come up enters a fault instead, so that the others fail with its cause at once instead of waiting
for a card that never comes. Any store with torch's `set`, `get`, `add` and `check` serves.
"""

import asyncio
import time
from typing import Protocol

from rrfp_async.errors import BusError

_POLL_S = 0.02


class Store(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Enter a value."""

    def get(self, key: str) -> bytes:
        """The value, once it is there; blocks."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns the sum."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""


class Directory:
    """The cards of one Runtime's ranks.

    Args:
        store: Shared by all ranks; keys are private to this Runtime (use a prefix).
        rank: This rank.
        world_size: How many cards there will be.
        timeout_s: How long to wait for the others, in seconds.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s

    async def claim(self) -> None:
        """Take this rank's place.

        Raises:
            BusError: If another process has it.
        """
        taken = await asyncio.to_thread(self._store.add, f"claim/{self._rank}", 1)
        if taken > 1:
            raise BusError(
                f"rank {self._rank} is claimed by {taken} processes: start each rank once, with "
                f"its own RANK"
            )

    async def enter(self, card: str) -> None:
        """Publish this rank's card."""
        await asyncio.to_thread(self._store.set, f"card/{self._rank}", card)

    async def enter_fault(self, fault: str) -> None:
        """Tell the ranks that wait for this one's card that it will not come."""
        await asyncio.to_thread(self._store.set, "fault", fault)

    async def collect(self) -> list[str]:
        """Every rank's card, in rank order.

        Raises:
            BusError: If a rank entered a fault, or cards are missing after the timeout.
        """
        deadline = time.monotonic() + self._timeout_s
        keys = [f"card/{rank}" for rank in range(self._world_size)]
        while not await self._has(keys):
            await self._raise_fault()
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not await self._has([key])]
                raise BusError(
                    f"ranks {missing} did not come up within {self._timeout_s} s: start all "
                    f"{self._world_size} ranks, or raise peer_timeout_s"
                )
            await asyncio.sleep(_POLL_S)
        await self._raise_fault()
        return [(await asyncio.to_thread(self._store.get, key)).decode() for key in keys]

    async def _has(self, keys: list[str]) -> bool:
        return await asyncio.to_thread(self._store.check, keys)

    async def _raise_fault(self) -> None:
        if await self._has(["fault"]):
            raise BusError((await asyncio.to_thread(self._store.get, "fault")).decode())

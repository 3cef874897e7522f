"""How ranks find one another: a key-value store that all of them reach.

Each rank enters a card (its addresses and public key) and collects everyone's. A rank that cannot
come up enters a fault instead, so that the others fail with its cause at once instead of waiting
for a card that never comes. Any store that has the methods of torch's named below serves.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from rrfp_async.errors import BusError, RrfpError

T = TypeVar("T")

_POLL_S = 0.02
_FAULT_POLL_S = 0.2


class Store(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Enter a value."""

    def get(self, key: str) -> bytes:
        """The value, once it is there; blocks."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns the sum."""

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Enter a value if the key's is `expected` (empty: if it has none); returns its value."""

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

    @asynccontextmanager
    async def sharing_faults(self) -> AsyncIterator[None]:
        """Enter what is raised inside as the run's fault; raise the first that any rank entered.

        Raises:
            BusError: The same on every rank that comes by here or waits in `unless_fault`.
        """
        try:
            yield
        except (RrfpError, RuntimeError, OSError) as error:  # torch's stores raise RuntimeErrors
            try:
                told = await asyncio.to_thread(self._store.compare_set, "fault", "", str(error))
            except (RuntimeError, OSError):
                raise BusError(f"the store cannot be reached: {error}") from error
            raise BusError(told.decode()) from error

    async def unless_fault(self, work: Awaitable[T]) -> T:
        """Await `work`, unless a rank enters a fault before it is done.

        Raises:
            BusError: The fault. `work` is cancelled then.
        """
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=_FAULT_POLL_S))[0]:
                await self._raise_fault()
            return task.result()
        finally:
            task.cancel()

    async def collect(self) -> list[str]:
        """Every rank's card, in rank order.

        Raises:
            BusError: If a rank entered a fault, or cards are missing after the timeout.
        """
        keys = await self._wait_for_all("card")
        return [(await asyncio.to_thread(self._store.get, key)).decode() for key in keys]

    async def meet(self) -> None:
        """Wait until every rank has come this far: connected to all others.

        Raises:
            BusError: As `collect`.
        """
        await asyncio.to_thread(self._store.set, f"up/{self._rank}", "")
        await self._wait_for_all("up")

    async def _wait_for_all(self, what: str) -> list[str]:
        deadline = time.monotonic() + self._timeout_s
        keys = [f"{what}/{rank}" for rank in range(self._world_size)]
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
        return keys

    async def _has(self, keys: list[str]) -> bool:
        return await asyncio.to_thread(self._store.check, keys)

    async def _raise_fault(self) -> None:
        if await self._has(["fault"]):
            raise BusError((await asyncio.to_thread(self._store.get, "fault")).decode())

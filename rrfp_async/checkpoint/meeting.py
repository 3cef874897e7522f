"""How ranks come together for one save or load: over a key-value store that all of them reach.

At every point each rank leaves a word and waits for everyone's. One that fails leaves a fault
instead, which all raise. While it waits or works, a rank shows that it is still there: others wait
for as long as it works, and name it once it is gone. What words and work mean is not known here.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from rrfp_async.errors import CheckpointError, StateError

T = TypeVar("T")

_LOOK_EVERY_S = 0.05
_ROLL_CALLS = 8  # in the time after which a silent rank is given up
_TOLD_AS_THEY_ARE = (ValueError, StateError, CheckpointError)


class Store(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Enter a value."""

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns the sum."""

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Enter a value if the key has none (`expected` is empty); returns its value."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""

    def delete_key(self, key: str) -> bool:
        """Forget a key."""


class Meeting:
    """One rank's place in a save or load.

    Args:
        call: What was called on this rank, for messages.
        store: Shared by all ranks; keys are private to this meeting (use a prefix).
        rank: This rank.
        world_size: How many ranks there are.
        come_within_s: How long a rank may take to come, in seconds.
        silent_within_s: How long one that has come may be silent, in seconds.
    """

    def __init__(
        self,
        call: str,
        store: Store,
        *,
        rank: int,
        world_size: int,
        come_within_s: float,
        silent_within_s: float,
    ) -> None:
        self._call = call
        self._store = store
        self._rank = rank
        self._ranks = range(world_size)
        self._come_within_s = come_within_s
        self._silent_within_s = silent_within_s
        self._beat = f"beat/{rank}"
        self._heard = [(0, time.monotonic())] * world_size  # beats, and when they became as many
        self._next_roll_call_s = 0.0
        self._points: list[str] = []

    async def gather(self, point: str, word: str = "") -> list[str]:
        """Leave `word` at `point`, and wait until every rank has left one there.

        Returns:
            Everyone's word, in rank order.

        Raises:
            CheckpointError, ValueError, StateError: What another rank failed with; or a rank has
                not come in time, or is gone.
        """
        self._points.append(point)
        await asyncio.to_thread(self._store.set, f"{point}/{self._rank}", word)
        while True:
            if await asyncio.to_thread(self._look, point):
                return await asyncio.to_thread(self._words, point)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def work(self, work: Awaitable[T]) -> T:
        """Await what this rank has to do, and show the others meanwhile that it goes on.

        Raises:
            CheckpointError, ValueError, StateError: What another rank failed with. `work` is
                cancelled then.
        """
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=_LOOK_EVERY_S))[0]:
                await asyncio.to_thread(self._look)
            return task.result()
        finally:
            task.cancel()

    @asynccontextmanager
    async def sharing_faults(self) -> AsyncIterator[None]:
        """Leave what is raised inside as the meeting's fault; raise the first that any rank left.

        Raises:
            CheckpointError, ValueError, StateError: The same on every rank.
        """
        try:
            yield
        except BaseException as error:
            ours = json.dumps([self._kind(error), self._told(error)])
            first = await asyncio.to_thread(self._enter_fault, ours)
            told_itself = self._kind(error) is not None and first == ours
            if told_itself or not isinstance(error, Exception):
                raise
            raise _fault(first) from error

    def forget(self) -> None:
        """Delete what this rank left, once every rank has come to the end of a later meeting."""
        left = [self._beat, *(f"{point}/{self._rank}" for point in self._points)]
        for key in [*left, "fault"] if self._rank == 0 else left:
            self._store.delete_key(key)

    def _enter_fault(self, ours: str) -> str:
        """The first fault that a rank entered; ours, if there is no store any more to ask."""
        try:
            return self._store.compare_set("fault", "", ours).decode()
        except (RuntimeError, OSError):  # what torch's stores raise
            return ours

    def _look(self, point: str | None = None) -> bool:
        """Show that this rank is here; whether every rank has been at `point`."""
        self._store.add(self._beat, 1)
        if point is not None and self._store.check([f"{point}/{rank}" for rank in self._ranks]):
            return True  # whatever went wrong since: a rank may have gone on already
        if self._store.check(["fault"]):
            raise _fault(self._store.get("fault"))
        if point is not None and time.monotonic() >= self._next_roll_call_s:
            self._next_roll_call_s = time.monotonic() + self._silent_within_s / _ROLL_CALLS
            self._call_roll(point)
        return False

    def _call_roll(self, point: str) -> None:
        """Name a rank that is late at `point` and not at work either."""
        for rank in self._ranks:
            if self._store.check([f"{point}/{rank}"]):
                continue
            beats, now = self._store.add(f"beat/{rank}", 0), time.monotonic()
            if beats != self._heard[rank][0]:
                self._heard[rank] = (beats, now)
            silent_s = now - self._heard[rank][1]
            if beats == 0 and silent_s > self._come_within_s:
                raise CheckpointError(
                    f"{self._call}: rank {rank} has not come within {self._come_within_s} s "
                    f"(stall_timeout_s): call the same on every rank"
                )
            if beats and silent_s > self._silent_within_s:
                raise CheckpointError(
                    f"{self._call}: rank {rank} was silent for {self._silent_within_s} s "
                    f"(peer_timeout_s): it has died, or its event loop is blocked"
                )

    def _words(self, point: str) -> list[str]:
        return [self._store.get(f"{point}/{rank}").decode() for rank in self._ranks]

    def _kind(self, error: BaseException) -> int | None:
        """Which of the errors that all ranks raise as they are it is, if it is one."""
        kinds = [isinstance(error, kind) for kind in _TOLD_AS_THEY_ARE]
        return kinds.index(True) if any(kinds) else None

    def _told(self, error: BaseException) -> str:
        if self._kind(error) is not None:
            return str(error)
        if isinstance(error, asyncio.CancelledError):
            return f"{self._call} was cancelled on rank {self._rank}"
        return f"{self._call} failed on rank {self._rank}: {type(error).__name__}: {error}"


def _fault(left: str | bytes) -> Exception:
    kind, told = json.loads(left)
    raised = CheckpointError if kind is None else _TOLD_AS_THEY_ARE[kind]
    return raised(told)

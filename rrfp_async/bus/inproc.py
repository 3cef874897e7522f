"""The bus between ranks of one process: a bounded mailbox per rank, frames as on a wire.

Every message is encoded and decoded, so that what passes here passes on sockets too.
"""

import asyncio
import dataclasses

from rrfp_async.bus.base import Bus, BusStatistics, PairSequences, decode_or_drop
from rrfp_async.bus.messages import Message
from rrfp_async.errors import BusError

MAILBOX_MOST = 65_536
"""Frames a mailbox holds. Backpressure keeps a run far below; reaching it is a fault."""


class InprocHub:
    """The mailboxes of `world_size` ranks. Each rank opens its own end once."""

    def __init__(self, world_size: int, *, mailbox_most: int = MAILBOX_MOST) -> None:
        self._mailboxes: list[asyncio.Queue[bytes | None]] = [
            asyncio.Queue() for _ in range(world_size)
        ]
        self._most = mailbox_most
        self._closed: set[int] = set()

    def open(self, rank: int) -> "InprocBus":
        """The end of `rank`."""
        return InprocBus(self, rank)

    def put_frame(self, target: int, frame: bytes) -> None:
        """Put raw bytes into the mailbox of `target`, as a peer's socket would.

        What is put for an end that has closed is lost.

        Raises:
            ValueError: If there is no rank `target`.
            BusError: If its mailbox is full.
        """
        self.require_room(target)
        if target not in self._closed:
            self.mailbox(target).put_nowait(frame)

    def require_room(self, target: int) -> None:
        """Raise as `put_frame` would for the next frame to `target`."""
        if self.mailbox(target).qsize() >= self._most and target not in self._closed:
            raise BusError(f"the mailbox of rank {target} is full: {self._most} frames wait there")

    def close(self, rank: int) -> None:
        """Close the end of `rank`: drop what waits there and wake its reader."""
        self._closed.add(rank)
        mailbox = self.mailbox(rank)
        while not mailbox.empty():
            mailbox.get_nowait()
        mailbox.put_nowait(None)

    def mailbox(self, rank: int) -> "asyncio.Queue[bytes | None]":
        """The frames waiting for `rank`; None marks a closed end."""
        if not 0 <= rank < len(self._mailboxes):
            raise ValueError(f"rank {rank} is not one of the {len(self._mailboxes)} ranks")
        return self._mailboxes[rank]


class InprocBus(Bus):
    """One rank's end of an `InprocHub`."""

    def __init__(self, hub: InprocHub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        self._mailbox = hub.mailbox(rank)
        self._pairs = PairSequences(rank)
        self._statistics = BusStatistics()
        self._closed = False

    @property
    def rank(self) -> int:
        """Whose end this is."""
        return self._rank

    def send_nowait(self, target: int, message: Message) -> None:
        """Encode `message` and put it into the mailbox of `target`."""
        if self._closed:
            raise BusError(f"the bus of rank {self._rank} is closed: open a new Runtime")
        self._hub.require_room(target)  # before a number is used up
        self._hub.put_frame(target, self._pairs.encode(target, message))
        self._statistics.sent += 1

    async def next_message(self) -> tuple[int, Message]:
        """Take, decode and check the next frame; malformed ones are passed over."""
        while not self._closed:
            frame = await self._mailbox.get()
            if frame is None:
                break
            envelope = decode_or_drop(frame, self._rank, self._statistics)
            if envelope is not None:
                self._pairs.accept(envelope)
                self._statistics.received += 1
                return envelope.source, envelope.message
        raise BusError(f"the bus of rank {self._rank} is closed: no message will come")

    def statistics(self) -> BusStatistics:
        """A snapshot of the counters."""
        return dataclasses.replace(self._statistics, pending=self._mailbox.qsize())

    def close(self) -> None:
        """Refuse further use and wake a waiting reader."""
        if not self._closed:
            self._closed = True
            self._hub.close(self._rank)

"""What is the inproc twin's own: its sender sees the mailbox, and no socket cuts a frame off."""

import asyncio

import pytest

from rrfp_async.bus.codec import FRAME_MOST_BYTES
from rrfp_async.bus.messages import Farewell
from rrfp_async.errors import BusError
from tests.bus.conftest import Buses, inproc

SOON_S = 2.0


async def _take(buses: Buses, rank: int, count: int) -> list[tuple[int, int]]:
    """Who sent which of the next farewells."""
    async with asyncio.timeout(SOON_S):
        taken = [await buses[rank].next_message() for _ in range(count)]
    return [(source, message.steps) for source, message in taken]


async def test_an_oversized_frame_is_dropped_and_the_reader_lives() -> None:
    """Counted, and the next message still comes."""
    async with inproc(2) as buses:
        buses.put_frame(1, b"\x00" * (FRAME_MOST_BYTES + 1))
        buses[0].send_nowait(1, Farewell(1))
        assert await _take(buses, 1, 1) == [(0, 1)]
        assert buses[1].statistics().dropped == 1


async def test_a_full_mailbox_is_the_sender_s_error() -> None:
    """Mailboxes are bounded: the message past the bound names the rank and the bound."""
    async with inproc(2, mailbox_most=4) as buses:
        for steps in range(4):
            buses[0].send_nowait(1, Farewell(steps))
        with pytest.raises(BusError, match="mailbox of rank 1 is full: 4 frames"):
            buses[0].send_nowait(1, Farewell(4))
        assert await _take(buses, 1, 4) == [(0, steps) for steps in range(4)]


async def test_a_refused_send_leaves_no_gap() -> None:
    """A send that raised has not counted: once there is room, the pair goes on."""
    async with inproc(2, mailbox_most=1) as buses:
        buses[0].send_nowait(1, Farewell(0))
        with pytest.raises(BusError, match="full"):
            buses[0].send_nowait(1, Farewell(1))
        assert await _take(buses, 1, 1) == [(0, 0)]
        buses[0].send_nowait(1, Farewell(2))
        assert await _take(buses, 1, 1) == [(0, 2)]

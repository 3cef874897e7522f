"""What every twin of the bus must do."""

import asyncio
import random

import pytest
from structlog.testing import capture_logs

from rrfp_async.bus.codec import encode
from rrfp_async.bus.messages import Envelope, Farewell, Message, StepEnd
from rrfp_async.errors import BusError
from tests.bus.conftest import Buses, OpenBuses
from tests.bus.sockets import until

SOON_S = 2.0


async def _next(buses: Buses, rank: int) -> tuple[int, Message]:
    async with asyncio.timeout(SOON_S):
        return await buses[rank].next_message()


async def _take(buses: Buses, rank: int, count: int) -> list[tuple[int, int]]:
    """Who sent which of the next farewells."""
    taken = [await _next(buses, rank) for _ in range(count)]
    return [(source, message.steps) for source, message in taken]


async def test_messages_keep_their_order_per_pair(open_buses: OpenBuses) -> None:
    """However senders interleave, each one's messages arrive in its order, none lost or doubled."""
    async with open_buses(4) as buses:
        senders = [1, 2, 3] * 100
        random.Random(1).shuffle(senders)
        sent: dict[int, int] = {1: 0, 2: 0, 3: 0}
        for sender in senders:
            buses[sender].send_nowait(0, Farewell(sent[sender]))
            sent[sender] += 1
        taken = await _take(buses, 0, 300)
    for sender in (1, 2, 3):
        assert [steps for source, steps in taken if source == sender] == list(range(100))


async def test_each_pair_is_numbered_on_its_own(open_buses: OpenBuses) -> None:
    """A sender's messages to others leave no gap for this one."""
    async with open_buses(3) as buses:
        for steps in range(3):
            buses[0].send_nowait(1, Farewell(steps))
            buses[0].send_nowait(2, Farewell(steps))
            buses[1].send_nowait(2, Farewell(steps))
        assert await _take(buses, 1, 3) == [(0, 0), (0, 1), (0, 2)]
        assert sorted(await _take(buses, 2, 6)) == [(s, n) for s in (0, 1) for n in range(3)]


async def test_a_reader_may_wait_before_anything_is_sent(open_buses: OpenBuses) -> None:
    """next_message wakes up when a message comes."""
    async with open_buses(2) as buses:
        waiting = asyncio.create_task(buses[1].next_message())
        await asyncio.sleep(0)
        buses[0].send_nowait(1, Farewell(5))
        async with asyncio.timeout(SOON_S):
            assert await waiting == (0, Farewell(5))


@pytest.mark.parametrize(("sequence", "fault"), [(2, "lost"), (0, "repeated")])
async def test_a_gap_or_a_repeat_names_the_pair(
    open_buses: OpenBuses, sequence: int, fault: str
) -> None:
    """After number 0, number 2 is a loss and number 0 a repeat: both ranks are named."""
    async with open_buses(2) as buses:
        buses[0].send_nowait(1, Farewell(0))
        assert await _take(buses, 1, 1) == [(0, 0)]
        buses.put_frame(1, encode(Envelope(0, sequence, Farewell(9))))
        with pytest.raises(BusError, match=f"from rank 0 to rank 1 were {fault}.*number 1 was due"):
            await _next(buses, 1)


def _malformed(rng: random.Random) -> bytes:
    """Random bytes, or a real frame that was cut, grown or changed."""
    frame = bytearray(encode(Envelope(0, 10**6, StepEnd(0, 0.5))))
    match rng.randrange(3):
        case 0:
            return rng.randbytes(rng.randrange(64))
        case 1:
            return bytes(frame[: rng.randrange(len(frame))])
        case _:
            return bytes(frame) + rng.randbytes(1 + rng.randrange(8))


@pytest.mark.parametrize("seed", [0, 1])
async def test_ten_thousand_malformed_frames_are_counted_and_dropped(
    open_buses: OpenBuses, seed: int
) -> None:
    """Bad frames between good ones cost nothing but a count: every good one arrives."""
    rng = random.Random(seed)
    async with open_buses(2) as buses:
        with capture_logs() as logs:
            for steps in range(10):
                for _ in range(1_000):
                    buses.put_frame(1, _malformed(rng))
                buses[0].send_nowait(1, Farewell(steps))
            assert await _take(buses, 1, 10) == [(0, steps) for steps in range(10)]
        statistics = buses[1].statistics()
    assert statistics.received == 10
    assert statistics.dropped == 10_000
    assert len(logs) <= 10_000
    assert {entry["log_level"] for entry in logs} == {"warning"}


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x91" * 100_000 + b"\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ],
    ids=["empty", "nested", "huge array", "huge bytes"],
)
async def test_a_hostile_frame_is_dropped_and_the_reader_lives(
    open_buses: OpenBuses, frame: bytes
) -> None:
    """Truncated, oversized and deeply nested frames: counted, the next message still comes."""
    async with open_buses(2) as buses:
        buses.put_frame(1, frame)
        buses[0].send_nowait(1, Farewell(1))
        with capture_logs() as logs:
            assert await _take(buses, 1, 1) == [(0, 1)]
        assert buses[1].statistics().dropped == 1
        assert [entry["rank"] for entry in logs] == [1]


async def test_a_frame_nested_a_thousand_deep_is_dropped(open_buses: OpenBuses) -> None:
    """The deepest nesting that msgpack itself takes is dropped like any other."""
    async with open_buses(2) as buses:
        buses.put_frame(1, b"\x91" * 1000 + b"\x00")
        buses[0].send_nowait(1, Farewell(1))
        assert await _take(buses, 1, 1) == [(0, 1)]


async def test_cancelling_a_reader_loses_nothing(open_buses: OpenBuses) -> None:
    """next_message cancelled at any moment, message there or not: every message still arrives."""
    async with open_buses(2) as buses:
        taken = []
        for steps in range(50):
            reader = asyncio.create_task(buses[1].next_message())
            for _ in range(steps % 3):
                await asyncio.sleep(0)
            buses[0].send_nowait(1, Farewell(steps))
            for _ in range(steps % 2):
                await asyncio.sleep(0)
            reader.cancel()
            [outcome] = await asyncio.gather(reader, return_exceptions=True)
            if not isinstance(outcome, BaseException):
                taken.append((outcome[0], outcome[1].steps))
        taken += await _take(buses, 1, 50 - len(taken))
    assert taken == [(0, steps) for steps in range(50)]


async def test_a_timeout_around_a_reader_loses_nothing(open_buses: OpenBuses) -> None:
    """A read that timed out leaves the next message to the next read."""
    async with open_buses(2) as buses:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await buses[1].next_message()
        buses[0].send_nowait(1, Farewell(3))
        assert await _take(buses, 1, 1) == [(0, 3)]


async def test_a_closed_end_refuses_and_wakes_its_reader(open_buses: OpenBuses) -> None:
    """After close: no sending, no reading, and who was reading gets an error; twice is harmless."""
    async with open_buses(2) as buses:
        waiting = asyncio.create_task(buses[1].next_message())
        await asyncio.sleep(0)
        buses[1].close()
        buses[1].close()
        async with asyncio.timeout(SOON_S):
            with pytest.raises(BusError, match="rank 1 is closed"):
                await waiting
        with pytest.raises(BusError, match="rank 1 is closed"):
            await _next(buses, 1)
        with pytest.raises(BusError, match="rank 1 is closed"):
            buses[1].send_nowait(0, Farewell(0))


async def test_sending_to_a_closed_end_is_lost_in_silence(open_buses: OpenBuses) -> None:
    """What others send to a closed end is nobody's error."""
    async with open_buses(2) as buses:
        buses[1].close()
        for steps in range(100):
            buses[0].send_nowait(1, Farewell(steps))


async def test_a_closed_end_never_fills_up(open_buses: OpenBuses) -> None:
    """However much is sent to a closed end, the sender gets no error and nothing is kept."""
    async with open_buses(2, mailbox_most=4) as buses:
        buses[1].close()
        for steps in range(100):
            buses[0].send_nowait(1, Farewell(steps))


@pytest.mark.parametrize("target", [-1, 2])
async def test_there_is_no_sending_to_a_rank_that_is_none(
    open_buses: OpenBuses, target: int
) -> None:
    """A wrong rank is a ValueError that says how many there are."""
    async with open_buses(2) as buses:
        with pytest.raises(ValueError, match=f"rank {target} is not one of the 2 ranks"):
            buses[0].send_nowait(target, Farewell(0))


async def test_statistics_count_what_passed(open_buses: OpenBuses) -> None:
    """Sent, received, pending and dropped, as a snapshot."""
    async with open_buses(2) as buses:
        for steps in range(3):
            buses[0].send_nowait(1, Farewell(steps))
        await until(lambda: buses[1].statistics().pending == 3)
        before = buses[1].statistics()
        await _take(buses, 1, 2)
        after = buses[1].statistics()
        assert buses[0].statistics().sent == 3
        assert (before.received, before.pending) == (0, 3)
        assert (after.received, after.pending, after.dropped) == (2, 1, 0)
        assert [end.rank for end in buses.ends] == [0, 1]

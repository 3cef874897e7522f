"""Ends of the ZeroMQ bus: closing, what is left behind, runs beside one another, and bounds."""

import asyncio
import contextlib
import gc
import inspect
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
import uvloop
import zmq

from rrfp_async.bus import zeromq as zeromq_module
from rrfp_async.bus.messages import Farewell, Hello, Message, PeerLost
from rrfp_async.errors import BusError
from tests.bus.sockets import End, open_end, open_ends, until
from tests.machine import took

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc/self")
LARGE = Hello((("x" * 16_000, "y" * 16_000),))


async def test_the_others_hear_what_an_end_said_last_and_then_that_it_is_gone() -> None:
    """A thousand messages sent just before closing arrive, and PeerLost after them, once."""
    async with open_ends(3, host_group=lambda rank: rank % 2) as ends:
        for steps in range(1_000):
            ends[2].bus.send_nowait(0, Farewell(steps))
            ends[2].bus.send_nowait(1, Farewell(steps))
        ends[2].bus.close()
        for end in ends[:2]:
            lost = await end.until_lost(2, within_s=5.0)
            assert f"from rank {end.bus.rank} to rank 2" in lost.reason
            assert end.taken == [(2, Farewell(steps)) for steps in range(1_000)]
        ends[0].bus.send_nowait(1, Farewell(1))
        assert await ends[1].next_message() == (0, Farewell(1))
        await asyncio.sleep(0.6)
        assert [end.bus.statistics().pending for end in ends[:2]] == [0, 0]


async def test_a_handler_hears_the_last_words_and_then_that_the_end_is_gone() -> None:
    """As a reader does: a thousand messages, then PeerLost, once; other ends are heard on."""
    async with open_ends(3, host_group=lambda rank: rank % 2) as ends:
        heard: list[tuple[int, Message]] = []
        delivery = asyncio.create_task(
            ends[0].bus.deliver(lambda source, message: heard.append((source, message)))
        )
        for steps in range(1_000):
            ends[2].bus.send_nowait(0, Farewell(steps))
        ends[2].bus.close()
        await until(lambda: len(heard) == 1_001)
        assert heard[:1_000] == [(2, Farewell(steps)) for steps in range(1_000)]
        assert isinstance(heard[1_000][1], PeerLost)
        ends[1].bus.send_nowait(0, Farewell(1))
        await until(lambda: len(heard) == 1_002)
        await asyncio.sleep(0.6)
        assert heard[1_001:] == [(1, Farewell(1))]
        delivery.cancel()
        await asyncio.gather(delivery, return_exceptions=True)


async def test_a_handler_is_called_where_the_socket_is_read() -> None:
    """Not a turn of the loop later, once what was there before is delivered."""
    async with open_ends(2) as ends:
        callers: list[str] = []

        def note(_source: int, _message: Message) -> None:
            callers.append(" ".join(frame.function for frame in inspect.stack()))

        delivery = asyncio.create_task(ends[0].bus.deliver(note))
        await asyncio.sleep(0)
        ends[1].bus.send_nowait(0, Farewell(0))
        await until(lambda: len(callers) == 1)
        assert "_on_readable" in callers[0]
        delivery.cancel()
        await asyncio.gather(delivery, return_exceptions=True)


async def test_a_reader_that_is_behind_still_hears_the_last_words_first() -> None:
    """40,000 messages, more than are read in the grace of half a second, precede PeerLost."""
    async with open_ends(2) as ends:
        count = 40_000
        for steps in range(count):
            ends[1].bus.send_nowait(0, Farewell(steps))
        ends[1].bus.close()
        await ends[0].until_lost(1, within_s=20.0)
        assert ends[0].taken == [(1, Farewell(steps)) for steps in range(len(ends[0].taken))]
        assert len(ends[0].taken) == count


async def test_sending_to_a_lost_peer_is_nobody_s_error() -> None:
    """It tells the reader, once, and counts nothing as sent."""
    async with open_ends(2) as ends:
        ends[1].bus.close()
        await ends[0].until_lost(1, within_s=3.0)
        for steps in range(100):
            ends[0].bus.send_nowait(1, Farewell(steps))
        await asyncio.sleep(0.6)
        assert ends[0].bus.statistics().sent == 0
        assert ends[0].bus.statistics().pending == 0


async def test_closing_twice_is_harmless() -> None:
    """In any order, waiting or not, from two tasks at once."""
    async with open_ends(2) as ends:
        ends[0].bus.close()
        await ends[0].bus.wait_closed()
        ends[0].bus.close()
        await asyncio.gather(ends[0].bus.wait_closed(), ends[0].bus.wait_closed())
        ends[1].bus.close()


async def test_closing_is_quick_when_a_peer_never_reads() -> None:
    """What is queued for a peer that does not read is given up after a second."""
    with patch.object(zeromq_module, "QUEUE_MOST", 8):
        async with open_ends(2) as ends:
            for _ in range(400):
                ends[0].bus.send_nowait(1, LARGE)
                await asyncio.sleep(0)
            with took() as closing:
                ends[0].bus.close()
                await ends[0].bus.wait_closed()
            assert closing.own_s < 2.0


async def test_what_is_sent_past_a_peer_that_never_reads_ends_in_an_error() -> None:
    """Bounded on both ends: the sender's reader is told, the one behind at the latest by its close.

    Nothing hangs and memory stays bounded: most of the 10,000 frames of 32 kB are refused.
    """
    with patch.object(zeromq_module, "QUEUE_MOST", 16):
        async with open_ends(2) as ends:
            for _ in range(10_000):
                ends[0].bus.send_nowait(1, LARGE)
                await asyncio.sleep(0)
            assert ends[0].bus.statistics().sent < 2_000
            assert isinstance(await ends[0].until_lost(1, within_s=3.0), PeerLost)
            assert ends[1].bus.statistics().pending <= 17
            ends[0].bus.close()
            got: list[object] = [(0, LARGE)]
            while got[-1] == (0, LARGE):
                got += await asyncio.gather(ends[1].next_message(), return_exceptions=True)
            assert isinstance(got[-1], BusError) or isinstance(got[-1][1], PeerLost)
            assert len(got) <= 19


async def test_nothing_more_is_sent_to_a_peer_whose_queue_was_full_once() -> None:
    """What the queue refused is lost, so what would follow it is not sent: no gap arrives."""
    with patch.object(zeromq_module, "QUEUE_MOST", 16):
        async with open_ends(2) as ends:
            for _ in range(10_000):  # without letting the peer read
                ends[0].bus.send_nowait(1, LARGE)
            sent = ends[0].bus.statistics().sent
            assert sent < 10_000
            got: list[object] = []
            with contextlib.suppress(TimeoutError):
                while not got or not isinstance(got[-1], BusError | TimeoutError):
                    got += await asyncio.gather(ends[1].next_message(), return_exceptions=True)
                    ends[0].bus.send_nowait(1, Farewell(9_999))
            assert ends[0].bus.statistics().sent == sent
            assert got[:16] == [(0, LARGE)] * 16
            assert "were lost" not in str(got[-1])


async def test_a_reader_that_breaks_says_so() -> None:
    """An error nobody foresaw where frames are read reaches next_message: no silent deafness."""
    fault = RuntimeError("nobody foresaw this")
    async with open_ends(2) as ends:
        with patch.object(zeromq_module, "decode_or_drop", side_effect=fault):
            ends[0].bus.send_nowait(1, Farewell(0))
            with pytest.raises((BusError, RuntimeError), match="nobody foresaw this"):
                await ends[1].next_message()


@contextlib.contextmanager
def _nothing_left() -> Iterator[None]:
    """Threads, zmq's own ones included, and open files are as they were."""
    gc.collect()
    before = _open()
    yield
    gc.collect()
    deadline = time.monotonic() + 2.0
    while _open() != before:
        assert time.monotonic() < deadline, (before, _open())
        time.sleep(0.01)


def _open() -> tuple[int, int, int]:
    """Threads of zmq, threads of Python, files."""
    return _zmq_threads(), threading.active_count(), len(os.listdir("/proc/self/fd"))


def _zmq_threads() -> int:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("ZMQbg") for name in names)


async def _talk(ends: list[End]) -> None:
    for end in ends:
        peer = (end.bus.rank + 1) % len(ends)
        end.bus.send_nowait(peer, Farewell(end.bus.rank))
        assert await ends[peer].next_message() == (end.bus.rank, Farewell(end.bus.rank))


async def _three_runs() -> None:
    for _ in range(3):
        async with open_ends(3, host_group=lambda rank: rank % 2) as ends:
            await _talk(ends)
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def _two_at_once() -> None:
    async with open_ends(2) as first, open_ends(2) as second:
        await _talk(first)
        first[0].bus.close()
        await _talk(second)
        async with open_ends(3) as third:
            await _talk(third)
        await _talk(second)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("main", [_three_runs, _two_at_once])
@ON_LINUX
def test_runs_after_and_beside_one_another_leave_nothing(main: Any, loop_factory: Any) -> None:
    """On one loop, asyncio's or uvloop's: every run's gate answers, and all it opened is gone.

    A gate that stopped badly would leave the next one deaf: no peer would ever be let in.
    """
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.sleep(0))  # uvloop opens files of its own, once
    with _nothing_left(), asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


@ON_LINUX
def test_a_start_that_failed_or_was_cancelled_leaves_nothing() -> None:
    """Nor does a rank that waited in vain; the next run on that loop comes up."""

    async def main() -> None:
        store = dist.HashStore()
        with pytest.raises(BusError, match="did not come up"):
            async with open_end(0, 2, store, timeout_s=0.2):
                pass
        waiting = asyncio.create_task(open_end(0, 2, dist.HashStore()).__aenter__())
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with open_ends(2) as ends:
            await _talk(ends)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with _nothing_left():
        asyncio.run(main())


async def test_every_socket_is_closed_by_the_object_that_made_it() -> None:
    """One closed through a shadow of it leaves its maker with a dangling pointer.

    When the maker is collected it looks into freed memory, and closes whatever is there now.
    """
    made: list[zmq.Socket] = []
    begin = zmq.Socket.__init__

    def note(self: zmq.Socket, *args: object, **kwargs: object) -> None:
        begin(self, *args, **kwargs)
        made.append(self)

    with patch.object(zmq.Socket, "__init__", note):
        async with open_ends(2):
            pass
    owners = [socket for socket in made if not socket._shadow]
    assert len(owners) >= 4
    assert [socket for socket in owners if not socket._closed] == []


async def test_a_closed_bus_leaves_no_timer_that_keeps_it() -> None:
    """A peer lost just before closing: the notice that was to come finds nobody, harmlessly."""
    async with open_ends(2) as ends:
        ends[1].bus.close()
        await until(lambda: bool(ends[0].bus._lost))
        ends[0].bus.close()
        await asyncio.sleep(0.6)
        with pytest.raises(BusError, match="closed"):
            await ends[0].bus.next_message()

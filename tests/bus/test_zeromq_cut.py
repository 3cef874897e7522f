"""A connection that is cut or falls silent: told in time, nothing skipped, never mended."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rrfp_async.bus.messages import Farewell, Message
from rrfp_async.errors import BusError
from tests.bus.proxy import Proxy
from tests.bus.sockets import End, Rewriting, open_ends

TIMEOUT_S = 2.0
SLACK_S = 1.5  # the grace for last words, and a busy machine


@contextlib.asynccontextmanager
async def _through_proxies(n: int = 2) -> AsyncIterator[tuple[list[End], Proxy, Proxy]]:
    """Ranks whose connections 0 -> 1 and 1 -> 0 each pass a proxy."""
    async with Proxy() as forth, Proxy() as back:
        proxies = {0: {1: forth.towards}, 1: {0: back.towards}}

        def store_of(rank: int, store: Any) -> Any:
            return Rewriting(store, proxies.get(rank, {}))

        async with open_ends(n, store_of=store_of, timeout_s=TIMEOUT_S) as ends:
            assert (forth.connections, back.connections) == (1, 1)
            yield ends, forth, back


async def _send_until(ends: list[End], proxy: Proxy, *, within_s: float) -> int:
    """Rank 0 sends numbered messages to rank 1 until it has lost it; returns how many."""
    count = 0
    async with asyncio.timeout(within_s):
        while not ends[0].bus._lost:
            ends[0].bus.send_nowait(1, Farewell(count))
            count += 1
            await asyncio.sleep(0.0005)
    return count


async def _drain(end: End) -> list[tuple[int, Message]]:
    """What has arrived, until nothing more comes."""
    got = []
    with contextlib.suppress(TimeoutError, BusError):
        while True:
            async with asyncio.timeout(0.8):
                got.append(await end.bus.next_message())
    return got


def _assert_gapless(got: list[tuple[int, Message]], source: int) -> int:
    """What came from `source` is a prefix of what it sent; returns its length."""
    steps = [m.steps for s, m in got if s == source and isinstance(m, Farewell)]
    assert steps == list(range(len(steps)))
    return len(steps)


@pytest.mark.parametrize(
    "after_bytes",
    [
        3_000,
        pytest.param(20_000, marks=pytest.mark.slow),
        pytest.param(60_000, marks=pytest.mark.slow),
    ],
)
async def test_a_cut_connection_is_told_and_what_came_is_a_gapless_prefix(
    after_bytes: int,
) -> None:
    """Cut in the middle of a frame: the sender's reader hears of it, no frame is skipped."""
    async with _through_proxies() as (ends, forth, _back):
        forth.cut_at_bytes = after_bytes
        sent = await _send_until(ends, forth, within_s=20.0)
        lost = await ends[0].until_lost(1, within_s=TIMEOUT_S + SLACK_S)
        assert "from rank 0 to rank 1" in lost.reason
        got = await _drain(ends[1])
        assert 0 < _assert_gapless(got, 0) < sent


async def test_the_far_end_of_a_cut_connection_hears_of_it_once_the_near_end_closes() -> None:
    """Rank 1, which waits for messages that never come, need not find out by a stall."""
    async with _through_proxies() as (ends, forth, _back):
        ends[0].bus.send_nowait(1, Farewell(0))
        assert await ends[1].next_message() == (0, Farewell(0))
        forth.cut()
        await ends[0].until_lost(1, within_s=TIMEOUT_S + SLACK_S)
        ends[0].bus.close()
        lost = await ends[1].until_lost(0, within_s=TIMEOUT_S + SLACK_S)
        assert "from rank 1 to rank 0" in lost.reason


async def test_a_cut_of_both_directions_is_told_on_both_ends() -> None:
    """Each reader is told about the other, once, within the timeout."""
    async with _through_proxies(3) as (ends, forth, back):
        begun = time.monotonic()
        forth.cut()
        back.cut()
        await asyncio.gather(
            ends[0].until_lost(1, within_s=TIMEOUT_S + SLACK_S),
            ends[1].until_lost(0, within_s=TIMEOUT_S + SLACK_S),
        )
        assert time.monotonic() - begun < TIMEOUT_S
        ends[2].bus.send_nowait(0, Farewell(2))
        assert await ends[0].next_message() == (2, Farewell(2))


async def test_a_connection_that_falls_silent_is_found_by_heartbeats() -> None:
    """Nothing is closed, nothing passes: both ends hear of it within the peer timeout."""
    async with _through_proxies() as (ends, forth, back):
        ends[0].bus.send_nowait(1, Farewell(0))
        assert await ends[1].next_message() == (0, Farewell(0))
        begun = time.monotonic()
        forth.fall_silent()
        back.fall_silent()
        await asyncio.gather(
            ends[0].until_lost(1, within_s=TIMEOUT_S + SLACK_S),
            ends[1].until_lost(0, within_s=TIMEOUT_S + SLACK_S),
        )
        assert time.monotonic() - begun > TIMEOUT_S / 4  # not by a disconnect


@pytest.mark.slow
async def test_a_connection_silent_in_one_direction_is_found() -> None:
    """Rank 0's messages go nowhere, rank 1's arrive: rank 0 hears of it, then rank 1."""
    async with _through_proxies() as (ends, forth, _back):
        forth.fall_silent()
        for steps in range(10):
            ends[0].bus.send_nowait(1, Farewell(steps))
        await ends[0].until_lost(1, within_s=TIMEOUT_S + SLACK_S)
        ends[0].bus.close()
        await ends[1].until_lost(0, within_s=TIMEOUT_S + SLACK_S)
        assert ends[1].taken == []


@pytest.mark.slow
async def test_heartbeats_keep_an_idle_connection_alive() -> None:
    """Three timeouts without a message: nobody is lost, the next message arrives."""
    async with _through_proxies() as (ends, _forth, _back):
        await asyncio.sleep(3 * TIMEOUT_S)
        assert [end.bus.statistics().pending for end in ends] == [0, 0]
        ends[0].bus.send_nowait(1, Farewell(0))
        assert await ends[1].next_message() == (0, Farewell(0))


@pytest.mark.slow
async def test_a_cut_connection_is_never_made_again() -> None:
    """The network is whole again at once: no second connection, and nothing more arrives."""
    async with _through_proxies() as (ends, forth, back):
        for steps in range(50):
            ends[0].bus.send_nowait(1, Farewell(steps))
        forth.cut()
        await ends[0].until_lost(1, within_s=TIMEOUT_S + SLACK_S)
        got = await _drain(ends[1])
        for steps in range(50, 100):
            ends[0].bus.send_nowait(1, Farewell(steps))
            await asyncio.sleep(0.02)
        got += await _drain(ends[1])
        assert (forth.connections, back.connections) == (1, 1)
        assert _assert_gapless(got, 0) <= 50

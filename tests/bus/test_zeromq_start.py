"""Ranks that cannot come up together: an error on all of them, in time, naming who and why."""

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from rrfp_async.bus.messages import Farewell, PeerLost
from tests.bus.sockets import (
    LOCALHOST,
    End,
    Rewriting,
    failures,
    free_port,
    open_end,
    open_ends,
)
from tests.machine import took

AT_ONCE_S = 1.0


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that somebody else listens on."""
    with socket.socket() as listener:
        listener.bind((LOCALHOST, 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def deaf_address() -> Iterator[str]:
    """An address where connections are accepted and nobody ever speaks."""
    with socket.socket() as listener:
        listener.bind((LOCALHOST, 0))
        listener.listen(16)
        yield f"tcp://{LOCALHOST}:{listener.getsockname()[1]}"


async def test_a_taken_port_is_told_on_every_rank_at_once(taken_port: int) -> None:
    """The ranks that wait fail with the one that could not bind, long before their timeout."""
    store = dist.HashStore()
    with took() as starting:
        told = await failures(
            *(open_end(rank, 3, store, port=taken_port if rank == 1 else 0) for rank in range(3))
        )
    assert starting.own_s < AT_ONCE_S
    for cause in told:
        assert f"rank 1 cannot bind tcp://{LOCALHOST}:{taken_port}" in cause
        assert "in use" in cause


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.7", 0), ("no.such.host.invalid", 0), (LOCALHOST, 65_536)]
)
async def test_an_impossible_address_is_told_on_every_rank(host: str, port: int) -> None:
    """An interface this host does not have, a name nobody has, a port past the last one."""
    store = dist.HashStore()
    told = await failures(
        open_end(0, 2, store, host=host, port=port), open_end(1, 2, store, host_group=1)
    )
    for cause in told:
        assert f"rank 0 cannot bind tcp://{host}:{port}" in cause


async def test_a_port_that_is_free_is_taken() -> None:
    """`port` is bound as given and entered in the directory."""
    store, port = dist.HashStore(), free_port()
    first, second = open_end(0, 2, store, port=port), open_end(1, 2, store)
    bus, _ = await asyncio.gather(first.__aenter__(), second.__aenter__())
    assert End(bus, store).card(0).tcp == f"tcp://{LOCALHOST}:{port}"
    await asyncio.gather(first.__aexit__(None, None, None), second.__aexit__(None, None, None))


@pytest.mark.parametrize("missing", [[2], [0, 3]])
async def test_missing_ranks_are_named_on_those_that_came(missing: list[int]) -> None:
    """Within the timeout, with every rank that did not come."""
    store = dist.HashStore()
    with took() as starting:
        told = await failures(
            *(open_end(rank, 4, store, timeout_s=0.5) for rank in range(4) if rank not in missing)
        )
    assert starting.own_s < 0.5 + AT_ONCE_S
    for cause in told:
        assert f"ranks {missing} did not come up within 0.5 s" in cause


async def test_a_rank_claimed_twice_is_named_on_all() -> None:
    """Two processes with one rank, so another is missing: all three hear which."""
    store = dist.HashStore()
    with took() as starting:
        told = await failures(*(open_end(rank, 3, store) for rank in (0, 0, 2)))
    assert starting.own_s < AT_ONCE_S
    assert {"rank 0 is claimed by 2 processes" in cause for cause in told} == {True}


async def test_a_late_second_claim_fails_alone() -> None:
    """A process that claims a rank of a running bus is refused; the bus goes on."""
    async with open_ends(2) as ends:
        [cause] = await failures(open_end(1, 2, ends[0].store))
        assert "rank 1 is claimed by 2 processes" in cause
        ends[0].bus.send_nowait(1, Farewell(0))
        assert await ends[1].next_message() == (0, Farewell(0))


async def test_an_address_where_nobody_listens_is_named_on_all() -> None:
    """No rank reaches rank 1: every rank fails within the timeout, naming rank 1's address."""
    address = f"tcp://{LOCALHOST}:{free_port()}"
    store: Any = Rewriting(dist.HashStore(), {1: lambda _: address})
    told = await failures(
        *(open_end(rank, 3, store, host_group=rank, timeout_s=1.0) for rank in range(3))
    )
    for cause in told:
        assert f"rank 1 at {address}" in cause


async def test_an_address_that_never_answers_is_named_within_the_timeout(
    deaf_address: str,
) -> None:
    """A connection without a handshake is as good as none."""
    store: Any = Rewriting(dist.HashStore(), {1: lambda _: deaf_address})
    with took() as starting:
        told = await failures(
            *(open_end(rank, 2, store, host_group=rank, timeout_s=1.0) for rank in range(2))
        )
    assert starting.own_s < 1.0 + AT_ONCE_S
    for cause in told:
        assert f"rank 1 at {deaf_address} within 1.0 s" in cause


async def test_a_pair_that_cannot_meet_fails_the_ranks_that_can() -> None:
    """Only rank 2 cannot reach rank 1; ranks 0 and 1 do not start without it."""
    address = f"tcp://{LOCALHOST}:{free_port()}"
    store = dist.HashStore()
    astray: Any = Rewriting(store, {1: lambda _: address})
    told = await failures(
        *(
            open_end(rank, 3, astray if rank == 2 else store, host_group=rank, timeout_s=1.0)
            for rank in range(3)
        )
    )
    for cause in told:
        assert f"rank 2 cannot reach rank 1 at {address}" in cause


async def test_a_rank_that_starts_late_finds_what_was_sent_first() -> None:
    """Who comes first waits; nothing sent from then on is lost."""
    store = dist.HashStore()

    async def first() -> list[tuple[int, Any]]:
        async with open_end(0, 2, store, host_group=0) as bus:
            for steps in range(100):
                bus.send_nowait(1, Farewell(steps))
            return [await bus.next_message()]

    async def second() -> list[tuple[int, Any]]:
        await asyncio.sleep(0.5)
        async with open_end(1, 2, store, host_group=1) as bus:
            got = [await bus.next_message() for _ in range(100)]
            bus.send_nowait(0, Farewell(1))
            return got

    async with asyncio.timeout(10.0):
        told, got = await asyncio.gather(first(), second())
    assert got == [(0, Farewell(steps)) for steps in range(100)]
    assert told == [(1, Farewell(1))]


async def test_a_rank_that_leaves_at_once_was_there() -> None:
    """Opened and closed before a slower peer has connected: the peer hears that it left.

    Not that its address is wrong. The slower peer reads the cards 0.3 s later than they came.
    """
    store = dist.HashStore()

    class Slow(Rewriting):
        def get(self, key: str) -> bytes:
            time.sleep(0.3)  # on the directory's thread
            return super().get(key)

    async def leave() -> None:
        async with open_end(0, 2, store, host_group=0):
            pass

    async def stay() -> tuple[int, Any]:
        slow: Any = Slow(store, {})
        async with open_end(1, 2, slow, host_group=1) as bus:
            return await bus.next_message()

    async with asyncio.timeout(10.0):
        _, (source, message) = await asyncio.gather(leave(), stay())
    assert source == 0
    assert isinstance(message, PeerLost)

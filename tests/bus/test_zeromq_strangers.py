"""Who is not of the run gets nothing in, and whoever sends nonsense disturbs nobody."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

import pytest
import torch.distributed as dist
import zmq
import zmq.asyncio
from structlog.testing import capture_logs
from zmq.utils.monitor import parse_monitor_message

from rrfp_async.bus.codec import FRAME_MOST_BYTES, encode
from rrfp_async.bus.messages import Envelope, Farewell, Hello, PeerLost
from rrfp_async.errors import CodecError
from tests.bus.sockets import LOCALHOST, End, open_end, open_ends, port_of, until

REFUSED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
REFUSED_WITHIN_S = 3.0


def _with_curve(stranger: zmq.asyncio.Socket, server: bytes, public: bytes, secret: bytes) -> None:
    stranger.curve_serverkey = server
    stranger.curve_publickey = public
    stranger.curve_secretkey = secret


def _plain(stranger: zmq.asyncio.Socket, server: bytes, peer: bytes) -> None:
    stranger.plain_username = b"rank 0"
    stranger.plain_password = server


def _unknown_key(stranger: zmq.asyncio.Socket, server: bytes, peer: bytes) -> None:
    _with_curve(stranger, server, *zmq.curve_keypair())


def _wrong_server_key(stranger: zmq.asyncio.Socket, server: bytes, peer: bytes) -> None:
    other, _ = zmq.curve_keypair()
    _with_curve(stranger, other, *zmq.curve_keypair())


def _stolen_public_key(stranger: zmq.asyncio.Socket, server: bytes, peer: bytes) -> None:
    _, secret = zmq.curve_keypair()
    _with_curve(stranger, server, peer, secret)


STRANGERS: dict[str, Callable[[zmq.asyncio.Socket, bytes, bytes], None]] = {
    "no curve": lambda *_: None,
    "plain": _plain,
    "unknown key": _unknown_key,
    "wrong server key": _wrong_server_key,
    "a peer's public key without its secret": _stolen_public_key,
}


@contextlib.asynccontextmanager
async def _stranger(kind: int = zmq.PUSH) -> AsyncIterator[zmq.asyncio.Socket]:
    """A socket in a context of its own, as in another process."""
    context = zmq.asyncio.Context()
    try:
        with context.socket(kind) as stranger:
            stranger.linger = 0
            stranger.reconnect_ivl = 1  # it is stubborn
            yield stranger
    finally:
        context.term()


async def _refusal(stranger: zmq.asyncio.Socket, address: str) -> list[int]:
    """Connect, speak, and wait until the connection was refused; all events till then."""
    events: list[int] = []
    with stranger.get_monitor_socket() as monitor:
        stranger.connect(address)
        for number in range(20):
            with contextlib.suppress(zmq.Again):
                await stranger.send(encode(Envelope(0, number, Farewell(666))), zmq.NOBLOCK)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REFUSED_WITHIN_S):
                while not any(event & REFUSED for event in events):
                    events.append(parse_monitor_message(await monitor.recv_multipart())["event"])
        await asyncio.sleep(0.05)  # it tries again, and again
        stranger.disable_monitor()
    return events


async def _assert_undisturbed(ends: list[End]) -> None:
    """No end has received or dropped anything; all pairs can talk, and nobody was lost."""
    for end in ends:
        statistics = end.bus.statistics()
        assert (statistics.received, statistics.dropped, statistics.pending) == (0, 0, 0)
    await _assert_all_talk(ends)


async def _assert_all_talk(ends: list[End]) -> None:
    for end in ends:
        for peer in range(len(ends)):
            if peer != end.bus.rank:
                end.bus.send_nowait(peer, Farewell(7))
    for end in ends:
        got = [await end.next_message() for _ in range(len(ends) - 1)]
        others = [rank for rank in range(len(ends)) if rank != end.bus.rank]
        assert sorted(got, key=lambda item: item[0]) == [(rank, Farewell(7)) for rank in others]


@pytest.mark.parametrize("way", ["tcp", "ipc"])
@pytest.mark.parametrize("name", STRANGERS)
async def test_a_stranger_gets_no_message_in(name: str, way: str) -> None:
    """Refused before a byte reaches the mailbox, on both transports; peers notice nothing."""
    async with open_ends(3) as ends, _stranger() as stranger:
        card = ends[0].card(1)
        STRANGERS[name](stranger, card.key.encode(), ends[0].card(0).key.encode())
        events = await _refusal(stranger, getattr(card, way))
        assert any(event & REFUSED for event in events)
        assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in events
        await _assert_undisturbed(ends)


async def test_a_rank_of_another_run_is_a_stranger() -> None:
    """Keys are made for each run: those of a run beside this one open nothing."""
    async with open_ends(2) as ours, open_ends(2) as theirs, _stranger() as stranger:
        card = ours[0].card(1)
        pair = theirs[0].bus._key_pair
        pair.connect(stranger, card.key.encode())
        events = await _refusal(stranger, card.tcp)
        assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in events
        await _assert_undisturbed(ours)
        await _assert_undisturbed(theirs)


async def test_a_stranger_that_comes_before_the_peers_is_refused_too() -> None:
    """Who connects while a rank still waits for its peers is judged once their keys are known."""
    store = dist.HashStore()
    async with contextlib.AsyncExitStack() as stack, _stranger() as stranger:
        first = asyncio.create_task(stack.enter_async_context(open_end(0, 2, store)))
        await until(lambda: store.check(["card/0"]))
        early = End(None, store)  # type: ignore[arg-type] # for its card only
        card = early.card(0)
        _unknown_key(stranger, card.key.encode(), b"")
        refusal = asyncio.create_task(_refusal(stranger, card.tcp))
        await asyncio.sleep(0.1)
        second = await stack.enter_async_context(open_end(1, 2, store))
        ends = [End(await first, store), End(second, store)]
        assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in await refusal
        await _assert_undisturbed(ends)


async def test_a_peer_that_lies_about_its_source_is_dropped_and_counted() -> None:
    """The key says who speaks: a message in another's name has no effect, on numbers neither."""
    async with open_ends(3) as ends:
        for number in range(3):
            ends[2].put_frame(1, encode(Envelope(0, number, Farewell(666))))
            ends[2].put_frame(1, encode(Envelope(1, number, Farewell(666))))
        ends[2].bus.send_nowait(1, Farewell(2))
        assert await ends[1].next_message() == (2, Farewell(2))
        statistics = ends[1].bus.statistics()
        assert (statistics.dropped, statistics.received) == (6, 1)
        ends[0].bus.send_nowait(1, Farewell(0))
        assert await ends[1].next_message() == (0, Farewell(0))


def _greeting(mechanism: bytes, *, server: bool = False) -> bytes:
    """The first bytes of a ZMTP 3 connection."""
    head = b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0")
    return head + bytes([server]) + bytes(31)


def _garbage(rng: random.Random) -> bytes:
    """What a port scanner, a browser, or a broken peer sends."""
    noise = rng.randbytes(rng.randrange(1, 2000))
    match rng.randrange(6):
        case 0:
            return b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        case 1:
            return _greeting(b"CURVE") + noise
        case 2:
            return _greeting(b"CURVE")[: rng.randrange(1, 64)]
        case 3:
            return _greeting(b"NULL") + b"\x04\x19\x05READY" + noise
        case 4:
            return b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f" + noise
        case _:
            return noise


async def _scan(port: int, rng: random.Random, connections: int) -> None:
    """Raw garbage over TCP; some connections are left half open until the end."""
    kept = []
    for number in range(connections):
        _, writer = await asyncio.open_connection(LOCALHOST, port)
        with contextlib.suppress(ConnectionError):
            writer.write(_garbage(rng))
            await writer.drain()
        kept.append(writer)
        if number % 3:
            writer.transport.abort()
    await asyncio.sleep(0.1)
    for writer in kept:
        writer.transport.abort()


@pytest.mark.parametrize("seed", [0, 1])
async def test_random_frames_and_raw_garbage_leave_the_loop_alive(seed: int) -> None:
    """10,000 random frames from a real peer while 200 connections bring garbage: all counted.

    Frames of any size, in messages of one to four parts; between them every real message arrives.
    """
    rng = random.Random(seed)
    async with open_ends(3) as ends:
        scan = asyncio.create_task(_scan(port_of(ends[0].card(1).tcp), rng, 200))
        with capture_logs():
            for steps in range(10):
                for _ in range(1_000):
                    parts = [
                        rng.randbytes(rng.randrange(300)) for _ in range(rng.choice((1, 1, 1, 4)))
                    ]
                    ends[0].bus._outlets[1].send_multipart(parts, zmq.NOBLOCK)
                ends[0].bus.send_nowait(1, Farewell(steps))
                ends[2].bus.send_nowait(1, Farewell(steps))
            got = [await ends[1].next_message() for _ in range(20)]
        await scan
        for source in (0, 2):
            assert [m.steps for s, m in got if s == source] == list(range(10))
        assert ends[1].bus.statistics().dropped == 10_000
        assert ends[1].bus.statistics().pending == 0
        await _assert_all_talk(ends)


async def test_a_message_of_many_parts_is_dropped_whole() -> None:
    """A real envelope behind other parts is no message."""
    async with open_ends(2) as ends:
        parts = [b"", encode(Envelope(0, 0, Farewell(666)))]
        ends[0].bus._outlets[1].send_multipart(parts)
        await _assert_all_talk(ends)
        assert ends[1].bus.statistics().dropped == 1


async def test_an_oversized_message_is_the_sender_s_error_and_leaves_no_gap() -> None:
    """Nothing past the limit is sent; the next message goes on where the last one ended."""
    async with open_ends(2) as ends:
        ends[0].bus.send_nowait(1, Farewell(0))
        with pytest.raises(CodecError, match="Hello takes"):
            ends[0].bus.send_nowait(1, Hello((("x" * 16_384, "y" * 16_384),) * 40))
        ends[0].bus.send_nowait(1, Farewell(1))
        assert [await ends[1].next_message() for _ in range(2)] == [
            (0, Farewell(0)),
            (0, Farewell(1)),
        ]


async def test_an_oversized_frame_ends_only_its_sender_s_connection() -> None:
    """A peer that sends one anyway is cut off and told so; the others go on."""
    async with open_ends(3) as ends:
        ends[0].put_frame(1, b"\0" * (FRAME_MOST_BYTES + 1))
        assert isinstance(await ends[0].until_lost(1, within_s=3.0), PeerLost)
        assert ends[1].bus.statistics().received == 0
        ends[2].bus.send_nowait(1, Farewell(2))
        ends[1].bus.send_nowait(2, Farewell(1))
        assert await ends[1].next_message() == (2, Farewell(2))
        assert await ends[2].next_message() == (1, Farewell(1))

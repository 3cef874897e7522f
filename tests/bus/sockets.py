"""Ends of the ZeroMQ bus for tests: ranks of one run on one loop, and what a test does to them.

Reaches into `ZeroMqBus` in one place only: raw bytes are sent through a legitimate peer's socket.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
import zmq

from rrfp_async.bus.directory import Directory
from rrfp_async.bus.messages import Message, PeerLost
from rrfp_async.bus.zeromq import Card, Place, ZeroMqBus, ZeroMqOpening
from rrfp_async.errors import BusError

LOCALHOST = "127.0.0.1"
TIMEOUT_S = 5.0
SOON_S = 2.0


class Rewriting:
    """A store in which one rank reads other addresses on the cards than were entered."""

    def __init__(self, store: Any, tcp_of: dict[int, Callable[[str], str]]) -> None:
        self._store = store
        self._tcp_of = tcp_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        """The value, with the address of a rewritten rank replaced."""
        value: bytes = self._store.get(key)
        kind, _, rank = key.partition("/")
        if kind != "card" or int(rank) not in self._tcp_of:
            return value
        card = json.loads(value)
        return json.dumps(card | {"tcp": self._tcp_of[int(rank)](card["tcp"])}).encode()


@dataclass
class End:
    """One rank's bus, and what its directory holds."""

    bus: ZeroMqBus
    store: Any
    taken: list[tuple[int, Message]] = field(default_factory=list)

    def card(self, rank: int) -> Card:
        """What `rank` entered in the directory."""
        return Card(**json.loads(self.store.get(f"card/{rank}")))

    def put_frame(self, target: int, frame: bytes) -> None:
        """Send raw bytes as this legitimate peer."""
        self.bus._outlets[target].send(frame, zmq.NOBLOCK)

    async def next_message(self) -> tuple[int, Message]:
        """The next message, soon."""
        async with asyncio.timeout(SOON_S):
            return await self.bus.next_message()

    async def until_lost(self, rank: int, *, within_s: float) -> PeerLost:
        """Read until `rank` is reported lost; what came before is in `taken`."""
        async with asyncio.timeout(within_s):
            while True:
                source, message = await self.bus.next_message()
                if source == rank and isinstance(message, PeerLost):
                    return message
                self.taken.append((source, message))


def open_end(
    rank: int,
    world_size: int,
    store: Any,
    *,
    host_group: int = 0,
    host: str = LOCALHOST,
    port: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> contextlib.AbstractAsyncContextManager[ZeroMqBus]:
    """The bus of one rank, not yet entered."""
    place = Place(rank, world_size, host, host_group, port)
    directory = Directory(store, rank=rank, world_size=world_size, timeout_s=timeout_s)
    return ZeroMqOpening(place, directory, peer_timeout_s=timeout_s)


@contextlib.asynccontextmanager
async def open_ends(
    n: int,
    *,
    host_group: Callable[[int], int] = lambda rank: rank,
    store_of: Callable[[int, Any], Any] = lambda rank, store: store,
    timeout_s: float = TIMEOUT_S,
) -> AsyncIterator[list[End]]:
    """The buses of `n` ranks on this loop; by default each on a host of its own, so over tcp."""
    store = dist.HashStore()
    async with contextlib.AsyncExitStack() as stack:
        opened = await asyncio.gather(
            *(
                stack.enter_async_context(
                    open_end(
                        rank,
                        n,
                        store_of(rank, store),
                        host_group=host_group(rank),
                        timeout_s=timeout_s,
                    )
                )
                for rank in range(n)
            )
        )
        yield [End(bus, store) for bus in opened]


async def failures(*contexts: contextlib.AbstractAsyncContextManager[ZeroMqBus]) -> list[str]:
    """Open ends that must all fail, at once; returns their errors."""
    outcomes = await asyncio.gather(*(_enter(context) for context in contexts))
    return [str(outcome) for outcome in outcomes]


async def _enter(context: contextlib.AbstractAsyncContextManager[ZeroMqBus]) -> BusError | None:
    try:
        async with context:
            return None
    except BusError as error:
        return error


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that no event tells of."""
    async with asyncio.timeout(SOON_S):
        while not holds():  # noqa: ASYNC110 - sockets take a moment
            await asyncio.sleep(0.001)


def port_of(address: str) -> int:
    """The port of a tcp:// address."""
    return int(address.rpartition(":")[2])


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        port: int = probe.getsockname()[1]
        return port

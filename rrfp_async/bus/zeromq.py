"""The bus between processes and hosts: ZeroMQ sockets, CURVE on each.

A rank binds one PULL and connects one PUSH to every peer's, so each pair has a socket per
direction. libzmq's own threads send heartbeats, so a peer is found silent even while Python
computes. A connection that was up is never made again: libzmq would reconnect and lose what was
on its way, so a disconnect is a lost peer, told to the reader as `PeerLost`.
"""

import asyncio
import dataclasses
import json
import sys
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Never

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from rrfp_async.bus.base import Bus, BusStatistics, Handler, PairSequences, decode_or_drop
from rrfp_async.bus.codec import FRAME_MOST_BYTES
from rrfp_async.bus.directory import Directory
from rrfp_async.bus.messages import Message, PeerLost
from rrfp_async.bus.security import Gate, KeyPair, PeerKeys
from rrfp_async.closing import surely
from rrfp_async.errors import BusError

_log = structlog.get_logger()

QUEUE_MOST = 65_536
"""Frames that wait for one peer, and messages that wait for the reader, at most."""

_Item = tuple[int, Message] | BusError | None
"""What the reader gets: a message, the bus's fault, or its end."""

_LINGER_MS = 300
_GRACE_S = 0.5  # what a rank said before it went may still be on its way
_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is.

    Attributes:
        rank: This rank.
        world_size: The number of ranks.
        host: The address of this rank's interface that its peers reach.
        host_group: Equal for ranks of one host (torchrun's GROUP_RANK); they talk over ipc.
        port: TCP port to bind, 0 for any.
    """

    rank: int
    world_size: int
    host: str
    host_group: int
    port: int = 0


@dataclass(frozen=True, slots=True)
class Card:
    """What a rank publishes of itself."""

    tcp: str
    ipc: str | None
    host_group: int
    key: str

    def address_for(self, host_group: int) -> str:
        """The address that a peer on `host_group` connects to."""
        return self.ipc if self.ipc is not None and host_group == self.host_group else self.tcp


class ZeroMqOpening:
    """Brings up this rank's end of the bus together with every other rank; a context manager.

    Args:
        place: Where this rank is.
        directory: Where ranks find one another.
        peer_timeout_s: How long peers may take to come up, and to be silent later.

    Raises:
        BusError: On entering, if the port cannot be bound, or a rank does not come up or cannot be
            reached in time; on every rank, with the same cause.
    """

    def __init__(self, place: Place, directory: Directory, *, peer_timeout_s: float) -> None:
        self._directory = directory
        self._bus = ZeroMqBus(place, peer_timeout_s=peer_timeout_s)

    async def __aenter__(self) -> "ZeroMqBus":
        bus, directory = self._bus, self._directory
        try:
            async with directory.sharing_faults():
                await directory.claim()
                await directory.enter(bus.bind())
                cards = [Card(**json.loads(card)) for card in await directory.collect()]
                await directory.unless_fault(bus.connect(cards))
                await directory.meet()
        except BaseException:
            await self._close()
            raise
        return bus

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        self._bus.close()
        await self._bus.wait_closed()


class ZeroMqBus(Bus):
    """One rank's end. Use `ZeroMqOpening`."""

    def __init__(self, place: Place, *, peer_timeout_s: float) -> None:
        self._place = place
        self._timeout_s = peer_timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.linger = 0  # a process that exits without closing must not hang
        self._key_pair = KeyPair()
        self._keys = PeerKeys()
        self._gate = Gate(self._context, self._keys)
        self._inlet: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._outlets: dict[int, zmq.Socket[bytes]] = {}
        self._monitors: list[zmq.asyncio.Socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._mailbox: asyncio.Queue[_Item] = asyncio.Queue()
        self._handler: Handler | None = None
        self._handling: asyncio.Future[Never] | None = None
        self._lost: set[int] = set()
        self._pairs = PairSequences(place.rank)
        self._statistics = BusStatistics()
        self._closed = False

    @property
    def rank(self) -> int:
        """Whose end this is."""
        return self._place.rank

    # -- coming up -----------------------------------------------------------------------------

    def bind(self) -> str:
        """Bind the receiving socket; returns this rank's card.

        Raises:
            BusError: If the address cannot be bound.
        """
        place = self._place
        self._key_pair.serve(self._inlet)
        self._configure(self._inlet)
        try:
            self._inlet.bind(f"tcp://{place.host}:{place.port}")
        except zmq.ZMQError as error:
            raise BusError(
                f"rank {place.rank} cannot bind tcp://{place.host}:{place.port}: {error}. Give "
                f"another port (port=0 takes any free one) or host"
            ) from error
        tcp = self._inlet.getsockopt_string(zmq.LAST_ENDPOINT)
        ipc = None
        if sys.platform == "linux":
            ipc = f"ipc://@rrfp-{uuid.uuid4()}"  # abstract: no file is left behind
            self._inlet.bind(ipc)
        card = Card(tcp, ipc, place.host_group, self._key_pair.public.decode())
        return json.dumps(dataclasses.asdict(card))

    async def connect(self, cards: list[Card]) -> None:
        """Connect to every peer and wait until each has accepted.

        Raises:
            BusError: If some cannot be reached in time, naming their ranks and addresses.
        """
        peers = {rank: card for rank, card in enumerate(cards) if rank != self.rank}
        self._keys.learn({card.key.encode(): rank for rank, card in peers.items()})
        asyncio.get_running_loop().add_reader(self._inlet.fileno(), self._on_readable)
        self._on_readable()
        accepted = {rank: self._connect_to(rank, card) for rank, card in peers.items()}
        if accepted:
            _, late = await asyncio.wait(accepted.values(), timeout=self._timeout_s)
            unreachable = [
                f"rank {rank} at {peers[rank].address_for(self._place.host_group)}"
                for rank, future in accepted.items()
                if future in late or not future.result()
            ]
            if unreachable:
                raise BusError(
                    f"rank {self.rank} cannot reach {', '.join(unreachable)} within "
                    f"{self._timeout_s} s: check that the address is right from there"
                )

    def _connect_to(self, rank: int, card: Card) -> "asyncio.Future[bool]":
        outlet = self._context.socket(zmq.PUSH)
        self._outlets[rank] = outlet
        self._key_pair.connect(outlet, card.key.encode())
        self._configure(outlet)
        outlet.reconnect_ivl = -1
        events = f"inproc://events-{rank}"
        outlet.monitor(events, zmq.EVENT_ALL)
        monitor = zmq.asyncio.Socket(self._context, zmq.PAIR)
        monitor.connect(events)
        self._monitors.append(monitor)
        accepted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        watch = self._telling(self._watch(rank, monitor, accepted))
        self._tasks.append(asyncio.create_task(watch))
        outlet.connect(card.address_for(self._place.host_group))
        return accepted

    def _configure(self, socket: "zmq.Socket[Any]") -> None:
        """Bounds and heartbeats: a silent peer is disconnected within the peer timeout."""
        socket.sndhwm = QUEUE_MOST
        socket.rcvhwm = QUEUE_MOST
        socket.maxmsgsize = FRAME_MOST_BYTES
        socket.heartbeat_ivl = max(1, int(200 * self._timeout_s))
        socket.heartbeat_timeout = max(1, int(700 * self._timeout_s))

    # -- use -----------------------------------------------------------------------------------

    def send_nowait(self, target: int, message: Message) -> None:
        """Encode `message` and queue it on the socket to `target`.

        To a peer that is gone, or for which `QUEUE_MOST` frames wait, nothing more is sent: the
        reader is told that it is lost.
        """
        if self._closed:
            raise BusError(f"the bus of rank {self.rank} is closed: open a new Runtime")
        if not 0 <= target < self._place.world_size:
            raise ValueError(f"rank {target} is not one of the {self._place.world_size} ranks")
        if target == self.rank:
            raise ValueError(f"rank {target} cannot send to itself")
        if target in self._lost:
            return
        frame = self._pairs.encode(target, message)
        try:
            self._outlets[target].send(frame, zmq.NOBLOCK)
        except zmq.Again:  # no connection, or a full queue: what is lost here ends the step
            self._lose(target)
            return
        except zmq.ZMQError as error:
            raise BusError(f"rank {self.rank} cannot send to rank {target}: {error}") from error
        self._statistics.sent += 1

    async def next_message(self) -> tuple[int, Message]:
        """The next message, lost peers included; see `Bus.next_message`."""
        return self._opened(None if self._closed else await self._mailbox.get())

    async def deliver(self, handler: Handler) -> Never:
        """Call `handler` from where the socket is read; see `Bus.deliver`."""
        while self._mailbox.qsize() or self._closed:
            handler(*await self.next_message())
        self._handling = asyncio.get_running_loop().create_future()
        self._handler = handler
        try:
            await self._handling
            raise AssertionError  # it has no result
        finally:
            self._handler = self._handling = None

    def statistics(self) -> BusStatistics:
        """A snapshot of the counters."""
        return dataclasses.replace(self._statistics, pending=self._mailbox.qsize())

    # -- what comes in -------------------------------------------------------------------------

    async def _telling(self, work: Coroutine[Any, Any, None]) -> None:
        """Tell the reader if `work` breaks: it would wait for ever."""
        try:
            await work
        except Exception as error:
            self._break(error)

    def _on_readable(self) -> None:
        """Take everything that has come: the socket signals a change of state, not each frame."""
        try:
            while not self._closed:
                frame = self._inlet.recv(zmq.NOBLOCK, copy=False)
                alone = not frame.more
                while frame.more:
                    frame = self._inlet.recv(zmq.NOBLOCK, copy=False)
                self._accept(frame, alone=alone)
                if not int(self._inlet.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    return
        except zmq.Again:  # it signalled something else, or was cut off
            pass
        except Exception as error:  # whatever it is, the reader would wait for ever
            self._break(error)

    def _accept(self, frame: zmq.Frame, *, alone: bool) -> None:
        """From a frame to a message for the handler, or in the bounded mailbox."""
        source = self._keys.rank_of(str(frame.get("User-Id")))
        envelope = decode_or_drop(frame.bytes, self.rank, self._statistics)
        if envelope is None:
            return
        if not alone or source != envelope.source:
            self._statistics.dropped += 1
            _log.warning("dropped a frame under a false name", rank=self.rank, sender=source)
            return
        self._pairs.accept(envelope)
        self._put((envelope.source, envelope.message))

    def _break(self, error: Exception) -> None:
        told = error if isinstance(error, BusError) else BusError(f"the bus broke: {error!r}")
        self._tell(told)

    async def _watch(
        self, rank: int, monitor: zmq.asyncio.Socket, accepted: "asyncio.Future[bool]"
    ) -> None:
        """Follow the connection to one peer until it ends."""
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not accepted.done():
                accepted.set_result(True)
            elif event & _LOST:
                if accepted.done():
                    self._lose(rank)
                else:
                    accepted.set_result(False)
                return

    def _lose(self, rank: int) -> None:
        """Tell the reader, once, that a peer is gone; a little later than what it said last."""
        if rank in self._lost:
            return
        self._lost.add(rank)
        reason = (
            f"the connection from rank {self.rank} to rank {rank} ended: its process died, was "
            f"silent for {self._timeout_s} s (peer_timeout_s), or the network cut it off"
        )
        loop = asyncio.get_running_loop()
        loop.call_later(_GRACE_S, self._tell, (rank, PeerLost(reason)))

    def _put(self, item: tuple[int, Message]) -> None:
        if self._mailbox.qsize() >= QUEUE_MOST:
            raise BusError(f"the mailbox of rank {self.rank} is full: {QUEUE_MOST} messages wait")
        self._tell(item)

    def _tell(self, item: _Item) -> None:
        """Give the handler what came, or whoever reads next."""
        if self._handler is None or self._handling is None or self._handling.done():
            self._mailbox.put_nowait(item)
            return
        try:
            self._handler(*self._opened(item))
        except Exception as error:
            self._handling.set_exception(error)

    def _opened(self, item: _Item) -> tuple[int, Message]:
        if item is None:
            raise BusError(f"the bus of rank {self.rank} is closed: no message will come")
        if isinstance(item, BusError):
            raise item
        self._statistics.received += 1
        return item

    # -- going down ----------------------------------------------------------------------------

    def close(self) -> None:
        """Stop reading, let queued frames leave for a moment, wake a waiting reader."""
        if self._closed:
            return
        self._closed = True
        self._tell(None)
        for task in self._tasks:
            task.cancel()
        self._gate.stop()
        for rank, outlet in self._outlets.items():
            outlet.disable_monitor()
            outlet.close(linger=0 if rank in self._lost else _LINGER_MS)
        for monitor in self._monitors:
            monitor.close(linger=0)
        asyncio.get_running_loop().remove_reader(self._inlet.fileno())
        self._inlet.close(linger=0)

    async def wait_closed(self) -> None:
        """Wait until what was queued has left or the linger time is over."""
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # the stopped authenticator must be done before its context ends
        finally:
            await surely(self._context.term)

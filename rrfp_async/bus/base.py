"""The bus as everyone sees it. Twins: `inproc` (ranks of one process), `zeromq` (processes).

Reliable and ordered per pair of ranks, or it raises: every envelope carries a number per pair, and
a gap or a repeat is an error naming the pair. A frame that is no message is counted, logged and
dropped. The bus does not know what a message means or which step is running.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Never

import structlog

from rrfp_async.bus import codec
from rrfp_async.bus.messages import Envelope, Message
from rrfp_async.errors import BusError, CodecError

_log = structlog.get_logger()

Handler = Callable[[int, Message], None]
"""Takes a message and the rank it came from."""


@dataclass(slots=True)
class BusStatistics:
    """Counters of one end of the bus: messages sent and received, frames dropped, now pending."""

    sent: int = 0
    received: int = 0
    dropped: int = 0
    pending: int = 0


class Bus(ABC):
    """One rank's end of the control plane."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Whose end this is."""

    @abstractmethod
    def send_nowait(self, target: int, message: Message) -> None:
        """Send `message` to rank `target`. Returns at once; order per target is kept.

        Raises:
            ValueError: If there is no rank `target`.
            BusError: If this end is closed. Queues are bounded: what passes a bound is an error,
                here, or where the sender cannot see it, as the loss of that peer.
        """

    @abstractmethod
    async def next_message(self) -> tuple[int, Message]:
        """The next message, with the rank it came from. Cancelling loses nothing.

        For the dispatcher alone: a second reader would take what is not its own.

        Raises:
            BusError: If a pair's messages show a gap or a repeat, or this end is closed.
        """

    async def deliver(self, handler: Handler) -> Never:
        """Call `handler` with every message, in order, until it raises; what comes then waits.

        As a loop over `next_message` would, but the handler may be called as soon as the message
        is there, without a turn of the reader's task. Cancelling loses nothing.

        Raises:
            BusError: As `next_message`.
            Exception: Whatever the handler raised.
        """
        while True:
            handler(*await self.next_message())

    @abstractmethod
    def statistics(self) -> BusStatistics:
        """A snapshot of the counters."""

    @abstractmethod
    def close(self) -> None:
        """Close this end; what others send to it from now on is lost. Twice is harmless."""


class PairSequences:
    """Numbers outgoing messages per target and checks incoming ones per source."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._next_out: defaultdict[int, int] = defaultdict(int)
        self._next_in: defaultdict[int, int] = defaultdict(int)

    def encode(self, target: int, message: Message) -> bytes:
        """The frame of the next message to `target`."""
        frame = codec.encode(Envelope(self._rank, self._next_out[target], message))
        self._next_out[target] += 1
        return frame

    def accept(self, envelope: Envelope) -> None:
        """Check that `envelope` is the next one of its pair.

        Raises:
            BusError: If messages before it are missing, or it came before.
        """
        expected = self._next_in[envelope.source]
        if envelope.sequence != expected:
            fault = "lost" if envelope.sequence > expected else "repeated"
            raise BusError(
                f"messages from rank {envelope.source} to rank {self._rank} were {fault}: "
                f"number {expected} was due, number {envelope.sequence} came"
            )
        self._next_in[envelope.source] += 1


def decode_or_drop(frame: bytes, rank: int, statistics: BusStatistics) -> Envelope | None:
    """The envelope in `frame`, or None after counting and logging a malformed one."""
    try:
        return codec.decode(frame)
    except CodecError as error:
        statistics.dropped += 1
        _log.warning("dropped a malformed frame", rank=rank, reason=str(error))
        return None

"""A bus on which agreement messages are under way for a while, and everything else is not.

What it wraps numbers and delivers the messages; which of them are about what, is not known here.
"""

import asyncio
from collections import defaultdict, deque
from typing import Never

from rrfp_async.bus.base import Bus, BusStatistics, Handler
from rrfp_async.bus.messages import AgreementMessage, Message


class DelayedBus(Bus):
    """One rank's end of another bus, whose agreement messages arrive `delay_s` seconds later.

    Those to one rank keep their order among themselves; other messages may overtake them, as what
    is said about tensors may come sooner or later than what is said about choices.
    """

    def __init__(self, bus: Bus, delay_s: float) -> None:
        self._bus = bus
        self._delay_s = delay_s
        self._under_way: defaultdict[int, deque[AgreementMessage]] = defaultdict(deque)
        self._closed = False

    @property
    def rank(self) -> int:
        """Whose end this is."""
        return self._bus.rank

    def send_nowait(self, target: int, message: Message) -> None:
        """Send now or, if it is an agreement message, after the delay."""
        if not isinstance(message, AgreementMessage):
            self._bus.send_nowait(target, message)
            return
        self._under_way[target].append(message)  # timers of one instant come in any order
        asyncio.get_running_loop().call_later(self._delay_s, self._arrive, target)

    def _arrive(self, target: int) -> None:
        message = self._under_way[target].popleft()
        if not self._closed:
            self._bus.send_nowait(target, message)

    async def next_message(self) -> tuple[int, Message]:
        """As the wrapped bus."""
        return await self._bus.next_message()

    async def deliver(self, handler: Handler) -> Never:
        """As the wrapped bus."""
        await self._bus.deliver(handler)

    def statistics(self) -> BusStatistics:
        """Of the wrapped bus: what is under way is not sent yet."""
        return self._bus.statistics()

    def close(self) -> None:
        """Close the wrapped end; what is under way is lost. Twice is harmless."""
        self._closed = True
        self._bus.close()

"""How far this rank's clock is from the first rank's: a few questions, the quickest answer counts.

As in NTP: the first rank's time was told somewhere between asking and hearing, so half the round
trip bounds the error. It does not know how a question travels.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

ROUND_TRIPS = 8
"""How often the first rank is asked."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """How a rank's clock relates to the first rank's.

    Attributes:
        offset_s: What to add to this rank's times to get the first rank's.
        error_s: How far off that is at most, in seconds.
    """

    offset_s: float
    error_s: float


SAME_CLOCK = Alignment(0.0, 0.0)
"""Of ranks that read one clock."""


class SharedClock:
    """The first rank's time, as another rank knows it.

    Args:
        clock: This rank's, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._offset_s = 0.0

    def follow(self, aligned: Alignment) -> None:
        """Use that offset, unless it may as well be none: ranks of a host read one clock."""
        surely_off = abs(aligned.offset_s) > aligned.error_s
        self._offset_s = aligned.offset_s if surely_off else 0.0

    def now_s(self) -> float:
        """The first rank's time."""
        return self._clock() + self._offset_s

    def own_s(self, time_s: float) -> float:
        """The first rank's time on this rank's clock."""
        return time_s - self._offset_s


class ClockProbe:
    """Asks the first rank for its time.

    Args:
        clock: This rank's, in seconds.
        ask: Sends the question of that number; the answer is to be given to `told`.
    """

    def __init__(self, clock: Callable[[], float], ask: Callable[[int], None]) -> None:
        self._clock = clock
        self._ask = ask
        self._awaited: tuple[int, asyncio.Future[float]] | None = None

    async def measure(self) -> Alignment:
        """Ask `ROUND_TRIPS` times, one after the other, and take the quickest answer."""
        best = Alignment(0.0, float("inf"))
        for number in range(ROUND_TRIPS):
            answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            self._awaited = number, answer
            asked_s = self._clock()
            self._ask(number)
            theirs_s = await answer
            half_s = (self._clock() - asked_s) / 2.0
            if half_s < best.error_s:
                best = Alignment(theirs_s - (asked_s + half_s), half_s)
        self._awaited = None
        return best

    def told(self, number: int, time_s: float) -> None:
        """The answer to a question has come; one that nobody awaits any more is ignored."""
        if self._awaited is not None and self._awaited[0] == number:
            answer = self._awaited[1]
            if not answer.done():
                answer.set_result(time_s)

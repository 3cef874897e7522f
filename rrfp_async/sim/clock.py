"""An event loop whose time is virtual: it passes only when nothing is left to do at an instant.

Ordinary asyncio code runs on it, without files, sockets or threads. Instants are told apart from
1e-10 s on (after 10 virtual days, from what a float can tell apart), so that sums of the same
durations in another order are one instant.
"""

import asyncio
import math
from typing import Any, NoReturn

_RESOLUTION_S = 1e-10


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time, starting at 0 s.

    asyncio's own loop runs on top of it: this class stands where the loop's selector would be,
    which is asked how long to sleep whenever no callback is ready.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._settling: list[asyncio.Future[None]] = []
        self._clock_resolution = _RESOLUTION_S
        self._selector = self

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    async def settle(self) -> None:
        """Return once all that happens at this instant has happened, but for others who settle."""
        settled = self.create_future()
        self._settling.append(settled)
        await settled

    def select(self, timeout: float | None) -> list[Any]:
        """Let time pass, as far as it may; `timeout` is None when no timer runs."""
        if self._ready or self._stopping or self._is_due():  # type: ignore[attr-defined] # asyncio's
            return []
        if self._settling:
            settling, self._settling = self._settling, []
            for settled in settling:
                if not settled.done():
                    settled.set_result(None)
        elif timeout is None:
            self._stuck()
        else:
            self._now_s = self._scheduled[0].when()  # type: ignore[attr-defined]
            self._clock_resolution = max(_RESOLUTION_S, 2.0 * math.ulp(self._now_s))
        return []

    def _is_due(self) -> bool:
        """Whether a timer belongs to this instant."""
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        return bool(timers) and timers[0].when() < self._now_s + self._clock_resolution

    def _stuck(self) -> NoReturn:
        raise RuntimeError("nothing is left to happen on the virtual clock, and the program waits")

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nothing sleeps that would have to be woken."""

"""Threads that wait so that the event loop need not: work in, awaitable out, first in first out.

The one place where something blocks: a device's computation, a process group's `Work.wait()`, a
CUDA event. What the work is, is not known here.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Seconds on a monotonic clock, such as `time.perf_counter`."""

    def __call__(self) -> float:
        """The time now, in seconds."""


@dataclass(frozen=True, slots=True)
class Computed(Generic[T]):
    """What a function returned and when it ran.

    Attributes:
        value: What it returned.
        started_s: When it began, in seconds of the world's clock.
        finished_s: When it had returned.
        finish: None where it was then done. Where it had only launched work on a device, the time
            that work is done, to be awaited.
    """

    value: T
    started_s: float
    finished_s: float
    finish: "asyncio.Future[float] | None" = None


@dataclass(slots=True)
class _Work:
    function: Callable[[], Any]
    future: "asyncio.Future[Computed[Any]]"
    loop: asyncio.AbstractEventLoop

    def run(self, clock: Clock) -> None:
        started = clock()
        try:
            value = self.function()
        except BaseException as error:  # it belongs to whoever awaits the future
            self._hand_back(self._fail, _awaitable(error))
        else:
            self._hand_back(self._finish, Computed(value, started, clock()))

    def _hand_back(self, deliver: Callable[[Any], None], outcome: object) -> None:
        with suppress(RuntimeError):  # the loop has closed: nobody is waiting any more
            self.loop.call_soon_threadsafe(deliver, outcome)

    def _finish(self, computed: Computed[Any]) -> None:
        if not self.future.done():
            self.future.set_result(computed)

    def _fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class WaitingThread:
    """One thread that runs functions in the order they were submitted.

    The thread is a daemon: a process that exits without closing, or whose function never returns
    (a send to a peer that is gone), does not wait for it.
    """

    def __init__(self, clock: Clock, *, name: str) -> None:
        self._clock = clock
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def submit(self, function: Callable[[], T]) -> "asyncio.Future[Computed[T]]":
        """Queue `function`; the future belongs to the running loop.

        Cancelling the future stops the waiting, not the function: its result is dropped.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Computed[T]] = loop.create_future()
        self._work.put(_Work(function, future, loop))
        return future

    def close(self) -> None:
        """Let the thread end once its current function has. Never waits; twice is harmless."""
        if not self._closed:
            self._closed = True
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work.run(self._clock)
            del work  # the last work's tensors must not live until the next


def _awaitable(error: BaseException) -> Exception:
    """The error in a form that a future can carry without ending the loop that awaits it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"{type(error).__name__} left a computation: {error}")
    wrapped.__cause__ = error
    return wrapped

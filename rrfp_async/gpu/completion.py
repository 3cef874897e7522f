"""Threads that wait so that the event loop need not: work in, awaitable out, first in first out.

The one place where something blocks: a device's computation, a process group's `Work.wait()`, a
CUDA event. What the work is, is not known here.
"""

import asyncio
import atexit
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")

_EXIT_JOIN_S = 2.0


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


class _Service:
    """What the thread of a `WaitingThread` runs. Knows not its owner, which may be dropped."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self.running = False
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._clock = clock
        self.thread.start()
        atexit.register(self._end_at_exit)

    def _serve(self) -> None:
        while (work := self.work.get()) is not None:
            self.running = True
            work.run(self._clock)
            self.running = False
            del work  # the last work's tensors must not live until the next
        atexit.unregister(self._end_at_exit)

    def _end_at_exit(self) -> None:
        self.work.put(None)
        self.thread.join(_EXIT_JOIN_S)


class WaitingThread:
    """One thread that runs functions in the order they were submitted.

    The thread is a daemon: a process that exits without closing, or whose function never returns,
    does not wait for it longer than two seconds. It does wait that long, because a thread that
    the interpreter's end finds inside torch takes the process down with it.
    """

    def __init__(self, clock: Clock, *, name: str) -> None:
        self._service = _Service(clock, name)
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def running(self) -> bool:
        """Whether a function is running now, awaited or not."""
        return self._service.running

    def submit(self, function: Callable[[], T]) -> "asyncio.Future[Computed[T]]":
        """Queue `function`; the future belongs to the running loop.

        Cancelling the future stops the waiting, not the function: its result is dropped.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Computed[T]] = loop.create_future()
        self._service.work.put(_Work(function, future, loop))
        return future

    def close(self) -> None:
        """Let the thread end once its current function has. Never waits; twice is harmless."""
        if not self._closed:
            self._closed = True
            self._service.work.put(None)

    def join(self, timeout_s: float) -> bool:
        """After `close`, wait for the thread to end; returns whether it has."""
        self._service.thread.join(timeout_s)
        return not self._service.thread.is_alive()


def _awaitable(error: BaseException) -> Exception:
    """The error in a form that a future can carry without ending the loop that awaits it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"{type(error).__name__} left a computation: {error}")
    wrapped.__cause__ = error
    return wrapped

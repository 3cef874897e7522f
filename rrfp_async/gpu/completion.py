"""Threads that wait so that the event loop need not: work in, awaitable out, first in first out.

The one place where something blocks: a device's computation, a process group's `Work.wait()`, a
CUDA event. What the work is, is not known here.
"""

import asyncio
import atexit
import enum
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


class _State(enum.Enum):
    WAITS = "in the queue"
    BEGUN = "runs, or has run"
    FAILED = "has raised"
    WITHDRAWN = "will not run"


class Work(Generic[T]):
    """A function in a thread's queue. The future belongs to the loop it was made on.

    Cancelling the future stops the waiting, not the function: its result is dropped.
    """

    def __init__(self, function: Callable[[], T], before: "Work[Any] | None" = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Computed[T]] = self._loop.create_future()
        self._function = function
        self._before = before
        self._state = _State.WAITS
        self._changing = threading.Lock()

    def withdraw(self) -> bool:
        """Keep the function from running, unless it has begun; returns whether it will not run."""
        with self._changing:
            if self._state is _State.WAITS:
                self._state = _State.WITHDRAWN
            return self._state is _State.WITHDRAWN

    def run(self, clock: Clock) -> None:
        """On the thread, run the function and hand the result back."""
        if not self._begin():
            return
        started = clock()
        try:
            value = self._function()
        except BaseException as error:  # it belongs to whoever awaits the future
            self._state = _State.FAILED
            self._hand_back(self._fail, _awaitable(error))
        else:
            self._hand_back(self._finish, Computed(value, started, clock()))

    def _begin(self) -> bool:
        before, self._before = self._before, None
        if before is not None and before._state is _State.FAILED:
            self.withdraw()
            self._hand_back(self._cancel, None)
        with self._changing:
            if self._state is _State.WITHDRAWN:
                return False
            self._state = _State.BEGUN
            return True

    def _hand_back(self, deliver: Callable[[Any], None], outcome: object) -> None:
        with suppress(RuntimeError):  # the loop has closed: nobody is waiting any more
            self._loop.call_soon_threadsafe(deliver, outcome)

    def _finish(self, computed: Computed[T]) -> None:
        if not self.future.done():
            self.future.set_result(computed)

    def _fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def _cancel(self, _outcome: None) -> None:
        self.future.cancel()


class _Service:
    """What the thread of a `WaitingThread` runs. Knows not its owner, which may be dropped."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.work: queue.SimpleQueue[Work[Any] | None] = queue.SimpleQueue()
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
        return self.queue(function).future

    def queue(self, function: Callable[[], T], *, before: Work[Any] | None = None) -> Work[T]:
        """As `submit`, but the work may be withdrawn, and does not run if `before` has failed."""
        work = Work(function, before)
        self._service.work.put(work)
        return work

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

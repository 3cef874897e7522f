"""Where tasks compute: one dedicated thread per device, so the event loop stays free.

A device runs one function at a time and reports when it started and finished. What the function
computes, and why it was chosen, is not known here.
"""

import asyncio
import queue
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from rrfp_async.errors import StateError
from rrfp_async.ids import TaskId

T = TypeVar("T")


class Clock(Protocol):
    """Seconds on a monotonic clock, such as `time.perf_counter`."""

    def __call__(self) -> float:
        """The time now, in seconds."""


@dataclass(frozen=True, slots=True)
class Computed(Generic[T]):
    """What a function returned and when it ran, in seconds of the world's clock."""

    value: T
    started_s: float
    finished_s: float


class Device(ABC):
    """A place that computes one function at a time."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Where the tensors of its tasks live."""

    @abstractmethod
    async def run(self, function: Callable[[], T], *, task: TaskId | None = None) -> Computed[T]:
        """Run `function` on the device's thread and wait for it.

        Args:
            function: Called without arguments; what it raises is raised here.
            task: The task it belongs to, or None for work between tasks.

        Cancelling stops the waiting, not the function: it runs to its end, its result is dropped.
        """

    @abstractmethod
    def close(self) -> None:
        """Take no more work. Never waits for a running function; twice is harmless."""


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


def _awaitable(error: BaseException) -> Exception:
    """The error in a form that a future can carry without ending the loop that awaits it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"{type(error).__name__} left a computation: {error}")
    wrapped.__cause__ = error
    return wrapped


class CpuDevice(Device):
    """The CPU, through one thread of its own.

    The thread is a daemon: a process that exits without closing does not wait for it.
    """

    def __init__(self, clock: Clock, *, name: str = "rrfp-compute") -> None:
        self._clock = clock
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def torch_device(self) -> torch.device:
        """`cpu`."""
        return torch.device("cpu")

    async def run(self, function: Callable[[], T], *, task: TaskId | None = None) -> Computed[T]:  # noqa: ARG002
        """Run `function` on the compute thread; see `Device.run`.

        Raises:
            StateError: If the device is closed.
        """
        if self._closed:
            raise StateError("the device is closed: open a new world")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Computed[T]] = loop.create_future()
        self._work.put(_Work(function, future, loop))
        return await future

    def close(self) -> None:
        """Let the thread end once its current function has."""
        if not self._closed:
            self._closed = True
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work.run(self._clock)
            del work  # the last task's tensors must not live until the next task

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn("a CpuDevice was never closed", ResourceWarning, stacklevel=2)
            self.close()


def adopt_num_threads(count: int) -> None:
    """Compute with `count` intra-op threads on this thread; a thread keeps the count it began with.

    Bits depend on the count, so a device's thread takes over its caller's at every step.
    """
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)

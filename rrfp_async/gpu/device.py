"""Where tasks compute: one dedicated thread per device, so the event loop stays free.

A device runs one function at a time and reports when it started and finished. What the function
computes, and why it was chosen, is not known here.
"""

import asyncio
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rrfp_async.errors import StateError
from rrfp_async.gpu.completion import Clock, Computed, T, WaitingThread, Work
from rrfp_async.ids import TaskId

_CPU = torch.device("cpu")
_LAUNCHED_MOST = 2  # the one that runs and one behind it


class Device(ABC):
    """A place that computes one function at a time."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Where the tensors of its tasks live."""

    @abstractmethod
    async def run(self, function: Callable[[], T], *, task: TaskId | None = None) -> Computed[T]:
        """Run `function` on the device's thread and wait for it.

        A device with a queue of its own may return once a task's work is launched there; see
        `Computed.finish`. What runs later on the device runs after it.

        Args:
            function: Called without arguments; what it raises is raised here.
            task: The task it belongs to, or None for work between tasks.

        Cancelling stops the waiting, not the function: it runs to its end, its result is dropped.
        """

    def lane(self) -> "Device":
        """This device as one Runtime uses it: what that gives and takes back is its own."""
        return self

    @property
    def takes_back(self) -> bool:
        """Whether a task may be given while another runs, and taken back until it has begun."""
        return False

    @property
    def busy(self) -> bool:
        """Whether a function runs there now, awaited or not, as far as is known."""
        return False

    def withdraw(self, task: TaskId) -> bool:  # noqa: ARG002 - takes nothing back
        """Take back `task`, which was given last, unless it has begun.

        Whoever awaits it is told nothing, and is to be cancelled.

        Returns:
            Whether it will not run.
        """
        return False

    def follow_caller(self) -> None:  # noqa: B027 - nothing on a CPU
        """Let what tasks do come after what the caller's thread has launched so far."""

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:  # noqa: B027 - nothing on a CPU
        """Note that `tensors`, made elsewhere, are about to be used by this device's tasks."""

    @abstractmethod
    def close(self) -> None:
        """Take no more work. Never waits for a running function; twice is harmless."""


class CpuDevice(Device):
    """The CPU, through one thread of its own; a process that exits does not wait for it."""

    def __init__(self, clock: Clock, *, name: str = "rrfp-compute") -> None:
        self._thread = WaitingThread(clock, name=name)

    @property
    def torch_device(self) -> torch.device:
        """`cpu`."""
        return _CPU

    async def run(self, function: Callable[[], T], *, task: TaskId | None = None) -> Computed[T]:  # noqa: ARG002
        """Run `function` on the compute thread; see `Device.run`.

        Raises:
            StateError: If the device is closed.
        """
        _refuse_closed(self._thread)
        return await self._thread.submit(function)

    @property
    def busy(self) -> bool:
        """Whether the thread runs something."""
        return self._thread.running

    def lane(self) -> "Device":
        """The same thread, on which one Runtime's tasks follow one another without the loop."""
        return _CpuLane(self._thread)

    def close(self) -> None:
        """Let the thread end once its current function has."""
        self._thread.close()

    def __del__(self) -> None:
        if hasattr(self, "_thread") and not self._thread.closed:
            warnings.warn("a CpuDevice was never closed", ResourceWarning, stacklevel=2)
            self.close()


class _CpuLane(Device):
    """A CPU device's thread, and which of one Runtime's tasks wait or run there."""

    def __init__(self, thread: WaitingThread) -> None:
        self._thread = thread
        self._given: dict[TaskId, Work[Any]] = {}

    @property
    def torch_device(self) -> torch.device:
        """`cpu`."""
        return _CPU

    async def run(self, function: Callable[[], T], *, task: TaskId | None = None) -> Computed[T]:
        """Run `function` on the compute thread; see `Device.run`.

        A task that was given behind one that fails is not run, and its caller is cancelled.

        Raises:
            StateError: If the device is closed.
        """
        _refuse_closed(self._thread)
        if task is None:
            return await self._thread.submit(function)
        before = next(reversed(self._given.values()), None)
        work = self._thread.queue(function, before=before)
        self._given[task] = work
        try:
            return await work.future
        finally:
            if self._given.get(task) is work:
                del self._given[task]
            if not work.future.cancel() and not work.future.cancelled():
                work.future.exception()  # it is known, also where nobody waits any more

    @property
    def takes_back(self) -> bool:
        """The thread goes from one task to the next by itself."""
        return True

    def withdraw(self, task: TaskId) -> bool:
        """Take back `task`, also if its turn to be given has not come; see `Device.withdraw`."""
        work = self._given.get(task)
        return work is None or work.withdraw()

    def close(self) -> None:
        """The thread is the device's."""


def _refuse_closed(thread: WaitingThread) -> None:
    if thread.closed:
        raise StateError("the device is closed: open a new world")


class CudaDevice(Device):
    """One GPU, through a thread that launches and a thread that waits. Not yet run on a GPU.

    Tasks run in order on one stream of their own. `run` returns when a task is launched, and at
    most one more is launched behind the one that runs: enough to keep the stream fed, and no
    choice is made earlier than that needs.
    """

    def __init__(self, device: torch.device, clock: Clock, *, name: str = "rrfp-compute") -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's
        self._launcher = WaitingThread(clock, name=name)
        self._waiter = WaitingThread(clock, name=f"{name}-wait")
        self._room = asyncio.Semaphore(_LAUNCHED_MOST)

    @property
    def torch_device(self) -> torch.device:
        """The GPU."""
        return self._device

    async def run(self, function: Callable[[], T], *, task: TaskId | None = None) -> Computed[T]:
        """Launch `function` on the device's stream; without a task, wait until it is done.

        Raises:
            StateError: If the device is closed.
        """
        if self._launcher.closed:
            raise StateError("the device is closed: open a new world")
        await self._room.acquire()
        try:
            launched = await self._launcher.submit(partial(self._launch, function))
        except BaseException:
            self._room.release()
            raise
        value, event = launched.value
        waiting = self._waiter.submit(event.synchronize)
        waiting.add_done_callback(lambda _: self._room.release())
        finish = asyncio.ensure_future(_finished(waiting))
        if task is not None:
            return Computed(value, launched.started_s, launched.finished_s, finish)
        return Computed(value, launched.started_s, await finish)

    @property
    def busy(self) -> bool:
        """Whether one of the threads runs something."""
        return self._launcher.running or self._waiter.running

    def follow_caller(self) -> None:
        """Let the device's stream wait for the caller's current one."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the allocator from reusing `tensors` before this stream is done with them."""
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def close(self) -> None:
        """Let both threads end once their current work has."""
        self._launcher.close()
        self._waiter.close()

    def _launch(self, function: Callable[[], T]) -> tuple[T, Any]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            value = function()
            event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch's
            event.record(self._stream)
        return value, event


async def _finished(waiting: "asyncio.Future[Computed[None]]") -> float:
    return (await waiting).finished_s


def make_device(
    kind: str, index: int, clock: Clock, *, name: str = "rrfp-compute"
) -> CpuDevice | CudaDevice:
    """The device of a rank: the CPU, or GPU `index`.

    Raises:
        ValueError: If the kind is unknown or the machine has no such device.
    """
    if kind == "cpu":
        return CpuDevice(clock, name=name)
    if kind != "cuda":
        raise ValueError(f"device {kind!r} is not known: use 'cpu' or 'cuda'")
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"device 'cuda' number {index} is not there: this machine shows "
            f"{torch.cuda.device_count()} GPUs; start at most that many ranks here, or use 'cpu'"
        )
    return CudaDevice(torch.device("cuda", index), clock, name=name)

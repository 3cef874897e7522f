"""Where tasks compute: one dedicated thread per device, so the event loop stays free.

A device runs one function at a time and reports when it started and finished. What the function
computes, and why it was chosen, is not known here.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from rrfp_async.errors import StateError
from rrfp_async.gpu.completion import Clock, Computed, T, WaitingThread
from rrfp_async.ids import TaskId


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


class CpuDevice(Device):
    """The CPU, through one thread of its own; a process that exits does not wait for it."""

    def __init__(self, clock: Clock, *, name: str = "rrfp-compute") -> None:
        self._thread = WaitingThread(clock, name=name)

    @property
    def torch_device(self) -> torch.device:
        """`cpu`."""
        return torch.device("cpu")

    async def run(self, function: Callable[[], T], *, task: TaskId | None = None) -> Computed[T]:  # noqa: ARG002
        """Run `function` on the compute thread; see `Device.run`.

        Raises:
            StateError: If the device is closed.
        """
        if self._thread.closed:
            raise StateError("the device is closed: open a new world")
        return await self._thread.submit(function)

    def close(self) -> None:
        """Let the thread end once its current function has."""
        self._thread.close()

    def __del__(self) -> None:
        if hasattr(self, "_thread") and not self._thread.closed:
            warnings.warn("a CpuDevice was never closed", ResourceWarning, stacklevel=2)
            self.close()


def adopt_num_threads(count: int) -> None:
    """Compute with `count` intra-op threads on this thread; a thread keeps the count it began with.

    Bits depend on the count, so a device's thread takes over its caller's at every step.
    """
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)

"""A CPU device that behaves like a GPU's queue: tasks are launched, and done a little later."""

import asyncio
import threading
import time
from collections.abc import Callable

import torch

from rrfp_async.gpu.completion import Computed, T, WaitingThread
from rrfp_async.gpu.device import Device
from rrfp_async.ids import TaskId


class LaunchAheadDevice(Device):
    """Computes at launch, but says it is done `late_s` seconds later; one may wait behind it.

    Attributes:
        done: The tasks that were said to be done, in order.
        most_ahead: The most launched and unfinished tasks there were at once.
    """

    def __init__(self, late_s: float) -> None:
        self._late_s = late_s
        self._launcher = WaitingThread(time.perf_counter, name="rrfp-fake-launch")
        self._waiter = WaitingThread(time.perf_counter, name="rrfp-fake-wait")
        self._room = asyncio.Semaphore(2)
        self._ahead = 0
        self.most_ahead = 0
        self.done: list[TaskId] = []

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    async def run(self, function: Callable[[], T], *, task: TaskId | None = None) -> Computed[T]:
        if task is None:
            return await self._launcher.submit(function)
        await self._room.acquire()
        launched = await self._launcher.submit(function)
        self._ahead += 1
        self.most_ahead = max(self.most_ahead, self._ahead)
        waiting = self._waiter.submit(lambda: threading.Event().wait(self._late_s))
        finish = asyncio.ensure_future(self._finish(waiting, task))
        return Computed(launched.value, launched.started_s, launched.finished_s, finish)

    async def _finish(self, waiting: "asyncio.Future[Computed[bool]]", task: TaskId) -> float:
        computed = await waiting
        self._ahead -= 1
        self._room.release()
        self.done.append(task)
        return computed.finished_s

    def close(self) -> None:
        self._launcher.close()
        self._waiter.close()

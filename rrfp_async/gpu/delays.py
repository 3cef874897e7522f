"""Seeded delays around any transfer and device: so that arrivals and dispatches really differ.

For tests, examples and emulation. Every delay is a function of the seed and of what is delayed,
not of the order in which things happen.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rrfp_async.gpu.completion import Computed, T
from rrfp_async.gpu.device import Device
from rrfp_async.gpu.transfer import Transfer, TransferStatistics
from rrfp_async.ids import Link, TaskId, TensorSpec


@dataclass(frozen=True, slots=True)
class Delays:
    """How long to wait: uniform between nothing and a maximum.

    Attributes:
        seed: Another seed gives another run.
        send_most_s: The longest wait before a send, in seconds.
        task_most_s: The longest wait before a task, in seconds; it holds the device.
    """

    seed: int
    send_most_s: float = 0.004
    task_most_s: float = 0.002

    def draw(self, most_s: float, *about: object) -> float:
        """The delay of the thing described by `about`, in seconds."""
        return random.Random(f"{self.seed}/{about}").uniform(0.0, most_s)


class DelayedTransfer(Transfer):
    """Waits before every send, and packs nothing, so that every tensor is one."""

    def __init__(self, inner: Transfer, delays: Delays) -> None:
        self._inner = inner
        self._delays = delays

    def export(self, tensor: torch.Tensor) -> torch.Tensor:
        """As the inner transfer does."""
        return self._inner.export(tensor)

    async def send(self, link: Link, sequence: int, tensors: Sequence[torch.Tensor]) -> None:
        """Wait, then send."""
        await asyncio.sleep(self._delays.draw(self._delays.send_most_s, "send", link, sequence))
        await self._inner.send(link, sequence, tensors)

    async def receive(
        self, link: Link, sequence: int, specs: Sequence[TensorSpec]
    ) -> list[torch.Tensor]:
        """As the inner transfer does."""
        return await self._inner.receive(link, sequence, specs)

    def statistics(self) -> TransferStatistics:
        """The inner transfer's counters; a send counts as open once its delay is over."""
        return self._inner.statistics()


class DelayedDevice(Device):
    """Sleeps on the device's thread before every task, as a slow computation would."""

    def __init__(self, inner: Device, delays: Delays) -> None:
        self._inner = inner
        self._delays = delays
        self._times: Counter[TaskId] = Counter()

    @property
    def torch_device(self) -> torch.device:
        """The inner device's."""
        return self._inner.torch_device

    async def run(self, function: Callable[[], T], *, task: TaskId | None = None) -> Computed[T]:
        """Sleep and run. The delay is drawn per task and how often it ran before."""
        if task is None:
            return await self._inner.run(function)

        def delayed() -> T:
            self._times[task] += 1  # not when it is given: it may be taken back
            delays, times = self._delays, self._times[task]
            time.sleep(delays.draw(delays.task_most_s, "task", task, times))
            return function()

        return await self._inner.run(delayed, task=task)

    def lane(self) -> Device:
        """The inner device's, with the same delays and counts."""
        lane = DelayedDevice(self._inner.lane(), self._delays)
        lane._times = self._times
        return lane

    @property
    def takes_back(self) -> bool:
        """As the inner device does."""
        return self._inner.takes_back

    def withdraw(self, task: TaskId) -> bool:
        """As the inner device does."""
        return self._inner.withdraw(task)

    def follow_caller(self) -> None:
        """As the inner device does."""
        self._inner.follow_caller()

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """As the inner device does."""
        self._inner.adopt(tensors)

    def close(self) -> None:
        """Close the inner device."""
        self._inner.close()

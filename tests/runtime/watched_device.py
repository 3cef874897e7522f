"""A device that tells what it was given and what was taken back, and stages that wait."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import rrfp_async as r
from rrfp_async.gpu.completion import Computed, T
from rrfp_async.gpu.device import Device
from rrfp_async.ids import TaskId

SOON_S = 5.0


@dataclass
class Told:
    """What happened on a device.

    Attributes:
        events: In order: `give 1F0`, `took back 1F0`, `kept 1F0`.
        most: The most tasks that were there at once, running or waiting.
    """

    events: list[str] = field(default_factory=list)
    most: int = 0
    there: int = 0

    async def until(self, event: str) -> None:
        """Wait for it; polls, as threads are watched too."""
        async with asyncio.timeout(SOON_S):
            while event not in self.events:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


class WatchedDevice(Device):
    """Another device, whose tasks are noted."""

    def __init__(self, inner: Device, told: Told) -> None:
        self._inner = inner
        self._told = told

    @property
    def torch_device(self) -> torch.device:
        return self._inner.torch_device

    async def run(self, function: Callable[[], T], *, task: TaskId | None = None) -> Computed[T]:
        if task is None:
            return await self._inner.run(function)
        self._told.events.append(f"give {task}")
        self._told.there += 1
        self._told.most = max(self._told.most, self._told.there)
        try:
            return await self._inner.run(function, task=task)
        finally:
            self._told.there -= 1

    def lane(self) -> Device:
        return WatchedDevice(self._inner.lane(), self._told)

    @property
    def takes_back(self) -> bool:
        return self._inner.takes_back

    def withdraw(self, task: TaskId) -> bool:
        withdrawn = self._inner.withdraw(task)
        self._told.events.append(f"{'took back' if withdrawn else 'kept'} {task}")
        return withdrawn

    def close(self) -> None:
        self._inner.close()


def with_watched_device(world: r.World, told: Told) -> r.World:
    """The same world, whose device tells."""
    return dataclasses.replace(world, device=WatchedDevice(world.device, told))


class Holding(nn.Module):
    """A linear layer and a tanh; the forward number `of`, or its backward, waits to be let go.

    Then it goes on, or raises an ArithmeticError that says `error`. Copies share what is noted and
    what is waited for.

    Attributes:
        ran: The numbers of forwards, in order.
        begun: Set when the one that waits does.
        let_go: Set it, and it goes on.
    """

    def __init__(
        self, *, of: int | None = None, backward: bool = False, error: str | None = None
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.ran: list[int] = []
        self.begun = threading.Event()
        self.let_go = threading.Event()
        self._error = error
        self._of = of
        self._backward = backward

    def __deepcopy__(self, memo: dict[int, Any]) -> "Holding":
        other = Holding(of=self._of, backward=self._backward, error=self._error)
        other.load_state_dict(self.state_dict())
        other.ran, other.begun, other.let_go = self.ran, self.begun, self.let_go
        return other

    def forward(self, x: Tensor) -> Tensor:
        number = len(self.ran)
        self.ran.append(number)
        output = self.linear(x).tanh()
        if number == self._of and self._backward:
            output.register_hook(self._wait)
        elif number == self._of:
            self._wait()
        return output

    def _wait(self, _gradient: Tensor | None = None) -> None:
        self.begun.set()
        if not self.let_go.wait(SOON_S):
            raise TimeoutError("nobody let the task go")
        if self._error is not None:
            raise ArithmeticError(self._error)

    async def until_ran(self, count: int) -> None:
        """Wait until so many forwards have begun."""
        async with asyncio.timeout(SOON_S):
            while len(self.ran) < count:  # noqa: ASYNC110 - another thread is watched
                await asyncio.sleep(0.001)

    async def until_begun(self) -> None:
        """Wait until the one that waits does."""
        async with asyncio.timeout(SOON_S):
            while not self.begun.is_set():  # noqa: ASYNC110 - another thread is watched
                await asyncio.sleep(0.001)

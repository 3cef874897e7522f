"""A device with a queue: the next task is launched behind the running one, headers wait."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import torch

import rrfp_async
from rrfp_async.bus.base import Bus, BusStatistics
from rrfp_async.bus.messages import Header, Message
from rrfp_async.ids import TaskId
from rrfp_async.world import Wires, World
from tests.gpu.launch_ahead import LaunchAheadDevice

RANKS, MICROBATCHES, WIDTH = 3, 6, 8


class Eavesdropper(Bus):
    """Notes, for each header that is sent, whether its task was done by then."""

    def __init__(self, inner: Bus, device: LaunchAheadDevice, early: list[TaskId]) -> None:
        self._inner = inner
        self._device = device
        self._early = early

    @property
    def rank(self) -> int:
        return self._inner.rank

    def send_nowait(self, target: int, message: Message) -> None:
        if isinstance(message, Header) and message.task not in self._device.done:
            self._early.append(message.task)
        self._inner.send_nowait(target, message)

    async def next_message(self) -> tuple[int, Message]:
        return await self._inner.next_message()

    def statistics(self) -> BusStatistics:
        return self._inner.statistics()

    def close(self) -> None:
        self._inner.close()


def stage(rank: int) -> torch.nn.Module:
    """The stage of `rank`, always the same."""
    torch.manual_seed(rank)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())


def reference(batch: torch.Tensor) -> list[torch.Tensor]:
    """Every gradient of the unpartitioned model."""
    model = torch.nn.Sequential(*map(stage, range(RANKS)))
    for part in batch.tensor_split(MICROBATCHES):
        (torch.nn.functional.mse_loss(model(part), part) * (len(part) / len(batch))).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


async def test_headers_wait_for_the_device_and_the_next_task_does_not() -> None:
    """Gradients are the reference's; no header precedes its task; two tasks are in the queue."""
    torch.set_num_threads(1)
    batch = torch.randn(2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(7))
    early: list[TaskId] = []
    devices: list[LaunchAheadDevice] = []

    async def main(world: World) -> list[torch.Tensor]:
        device = LaunchAheadDevice(late_s=0.003)
        devices.append(device)

        @asynccontextmanager
        async def connect(config: rrfp_async.Config) -> AsyncIterator[Wires]:
            async with world.connect(config) as wires:
                yield Wires(Eavesdropper(wires.bus, device, early), wires.transfer)

        module = stage(world.rank)
        config = rrfp_async.Config(microbatches=MICROBATCHES)
        queued = replace(world, device=device, connect=connect)
        async with rrfp_async.Runtime(
            module, world=queued, config=config, loss_fn=torch.nn.functional.mse_loss
        ) as runtime:
            result = await runtime.train_step(batch, target=batch)
        device.close()
        assert result.compute_s >= 2 * MICROBATCHES * 0.003
        return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]

    by_rank = await rrfp_async.run_local(RANKS, main)
    gradients = [gradient for gradients in by_rank for gradient in gradients]
    expected = reference(batch)
    assert len(gradients) == len(expected) == 2 * RANKS
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients, expected, strict=True))
    assert early == []
    assert max(device.most_ahead for device in devices) == 2

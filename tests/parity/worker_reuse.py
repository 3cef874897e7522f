"""A rank for tests: stage 0 makes its second output while its first is still being sent.

    torchrun --nproc-per-node 2 tests/parity/worker_reuse.py (reuse|fresh|small)

The first send of rank 0 begins only when the stage's second forward has run. With "reuse" that
wrote to the same buffer. With "small" the buffer travels behind its header, and nothing is held.
"""

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import Tensor, nn

import rrfp_async as r
from rrfp_async.gpu.group_transfer import PACKED_MOST_BYTES
from rrfp_async.gpu.transfer import Transfer, TransferStatistics
from rrfp_async.ids import Link, TensorSpec
from rrfp_async.world import Wires
from tests.ranks.telling import say, tell_failure

MICROBATCHES = {"reuse": 3, "fresh": 3, "small": 64}
SAMPLES = 4
LARGE = PACKED_MOST_BYTES // SAMPLES
"""Features of float32, four times what travels behind a header."""


class Doubling(nn.Module):
    """Doubles what it gets, into fresh tensors or its one buffer; sets an event the second time."""

    def __init__(self, features: int, *, reuses: bool, second: asyncio.Event) -> None:
        super().__init__()
        self.buffer = torch.zeros(SAMPLES, features)
        self._reuses = reuses
        self._second = second
        self._loop = asyncio.get_running_loop()
        self._forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self._forwards += 1
        output = self.buffer.copy_(x * 2) if self._reuses else x * 2
        if self._forwards == 2:
            self._loop.call_soon_threadsafe(self._second.set)
        return output


class HeldTransfer(Transfer):
    """Lets nothing go before an event has happened."""

    def __init__(self, inner: Transfer, event: asyncio.Event) -> None:
        self._inner = inner
        self._event = event

    def export(self, tensor: Tensor) -> Tensor:
        return self._inner.export(tensor)

    async def send(self, link: Link, sequence: int, tensors: Sequence[Tensor]) -> None:
        await self._event.wait()
        await self._inner.send(link, sequence, tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def receive(self, link: Link, sequence: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        return await self._inner.receive(link, sequence, specs)

    def statistics(self) -> TransferStatistics:
        return self._inner.statistics()


def held(world: r.World, event: asyncio.Event) -> r.World:
    """The same world, whose sends wait for the event."""

    @asynccontextmanager
    async def connect(config: r.Config) -> AsyncIterator[Wires]:
        async with world.connect(config) as wires:
            yield dataclasses.replace(wires, transfer=HeldTransfer(wires.transfer, event))

    return dataclasses.replace(world, connect=connect)


async def _main(way: str) -> None:
    world, second, count = r.torchrun_world(), asyncio.Event(), MICROBATCHES[way]
    features = 8 if way == "small" else LARGE
    stage: nn.Module = nn.Identity()
    x = torch.arange(float(count * SAMPLES)).unsqueeze(1).expand(-1, features)
    wrapped = world
    if world.rank == 0:
        stage = Doubling(features, reuses=way != "fresh", second=second)
        wrapped = world if way == "small" else held(world, second)
    config = r.Config(microbatches=count, limit=count)
    loss_fn = nn.functional.mse_loss
    async with world, r.Runtime(stage, world=wrapped, config=config, loss_fn=loss_fn) as runtime:
        try:
            result = await runtime.train_step(x, target=2 * x)
        except r.StepFailed as error:
            tell_failure(error)
        else:
            say("step", loss=result.loss)


def main() -> int:
    """Run the command line."""
    torch.set_num_threads(1)
    r.run(lambda: _main(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

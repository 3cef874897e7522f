"""A rank for tests of late data: holds single sends back, notes arrivals, ticks beside the step.

    torchrun --nproc-per-node 3 tests/ranks/worker_delayed.py SOURCE NUMBER:SECONDS,... FOLDER

From rank SOURCE to the next one, send NUMBER begins SECONDS after its header. Tells each send and
receive, and on every rank the ticks of a ticker and its gaps.
"""

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rrfp_async as r
from rrfp_async.gpu.transfer import Transfer, TransferStatistics
from rrfp_async.ids import Link, TensorSpec
from rrfp_async.world import Wires
from tests.machine import Ticker
from tests.ranks.telling import say

WIDTH = 1024  # rows of 4 KiB
ROWS = 1024  # tensors of 4 MiB
MICROBATCHES = 6


class LateTransfer(Transfer):
    """Begins some sends of one link late, and tells when sends begin and receives end."""

    def __init__(self, inner: Transfer, link: Link, late_s: Mapping[int, float]) -> None:
        self._inner = inner
        self._link = link
        self._late_s = late_s

    def export(self, tensor: Tensor) -> Tensor:
        return self._inner.export(tensor)

    async def send(self, link: Link, sequence: int, tensors: Sequence[Tensor]) -> None:
        if link == self._link and sequence in self._late_s:
            say("held", link=str(link), sequence=sequence)
            await asyncio.sleep(self._late_s[sequence])
        say("sent", link=str(link), sequence=sequence)
        await self._inner.send(link, sequence, tensors)

    async def receive(self, link: Link, sequence: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        say("awaiting", link=str(link), sequence=sequence)
        tensors = await self._inner.receive(link, sequence, specs)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        say("received", link=str(link), sequence=sequence, bytes=size)
        return tensors

    def statistics(self) -> TransferStatistics:
        return self._inner.statistics()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def with_late_sends(world: r.World, link: Link, late_s: Mapping[int, float]) -> r.World:
    """The same world with a `LateTransfer` around its transfer."""

    @asynccontextmanager
    async def connect(config: r.Config) -> AsyncIterator[Wires]:
        async with world.connect(config) as wires:
            yield dataclasses.replace(wires, transfer=LateTransfer(wires.transfer, link, late_s))

    return dataclasses.replace(world, connect=connect)


class Timed(nn.Module):
    """A cheap stage that tells when it ran on which microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        say("forward")
        return hidden * self.scale


async def _main(world: r.World, folder: Path) -> None:
    config = r.Config(
        microbatches=MICROBATCHES,
        hint="bf",
        limit=MICROBATCHES,
        trace_dir=folder,
        return_outputs=False,
    )
    inputs = torch.zeros(MICROBATCHES * ROWS, WIDTH)
    async with (
        world,
        r.Runtime(Timed(), world=world, config=config, loss_fn=nn.functional.mse_loss) as runtime,
    ):
        async with Ticker() as ticker:
            await runtime.train_step(inputs, target=inputs)
        ticks = [dataclasses.astuple(tick) for tick in ticker.ticks]
        say("step", gaps=ticker.gaps, ticks=ticks)


def main() -> int:
    """Run the command line."""
    torch.set_num_threads(1)
    source, numbers, folder = sys.argv[1:]
    link = Link(int(source), int(source) + 1)
    pairs = [pair.split(":") for pair in numbers.split(",")]
    world = with_late_sends(r.torchrun_world(), link, {int(n): float(s) for n, s in pairs})
    r.run(lambda: _main(world, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

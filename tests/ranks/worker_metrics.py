"""A rank for tests of what `Runtime.metrics()` counts: small tensors, then large ones.

torchrun --nproc-per-node 2 tests/ranks/worker_metrics.py
"""

import sys

import torch
from torch import Tensor, nn

import rrfp_async as r
from tests.ranks.telling import say

RANKS, MICROBATCHES, ROWS = 2, 4, 8
WIDTHS = (8, 16_384)
"""Rows of 32 bytes, which travel with their header between processes, and of 64 KiB."""


class Scale(nn.Module):
    """As many parameters as features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


async def counters_of(world: r.World, width: int) -> dict[str, float]:
    """What a rank has counted after two steps of training and one of evaluation, no times."""
    async with r.Runtime(
        Scale(width),
        world=world,
        config=r.Config(microbatches=MICROBATCHES, hint="bf"),
        loss_fn=nn.functional.mse_loss,
    ) as runtime:
        x = torch.ones(ROWS, width)
        for _ in range(2):
            await runtime.train_step(x, target=x)
        await runtime.eval_step(x, target=x)
        metrics = runtime.metrics()
        counts = {f"{key} count": held.count for key, held in metrics.histograms.items()}
        return {**metrics.counters, **counts}


async def tell(world: r.World) -> None:
    """Say what was counted, for each width."""
    async with world:
        for width in WIDTHS:
            say("counted", width=width, counters=await counters_of(world, width))


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = r.torchrun_world(r.Topology(RANKS))
    r.run(lambda: tell(found))
    sys.exit(0)

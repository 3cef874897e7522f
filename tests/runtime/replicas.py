"""Pipelines with replicas, in this process, and what their gradients are compared with.

Each replica gets its part of the batch. What a replica's gradients are to be is computed apart for
each, and averaged by hand.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rrfp_async as r

WIDTH = 8
BATCH = 8

Wrap = Callable[[r.World], r.World]
Batch = tuple[Tensor, Tensor]


@dataclass
class Run:
    """What every rank came to.

    Attributes:
        stages: Each rank's modules, by stage.
        results: Each rank's results, by step.
    """

    stages: list[dict[int, nn.Module]]
    results: list[list[r.StepResult]] = field(default_factory=list)

    def of_replica(self, dp: int, topology: r.Topology) -> dict[int, nn.Module]:
        """All stages of one replica."""
        ranks = [pp * topology.dp + dp for pp in range(topology.pp)]
        return {stage: held for rank in ranks for stage, held in self.stages[rank].items()}


def layers(count: int, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """Stages of a linear layer and a tanh."""
    torch.manual_seed(7)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Tanh()) for _ in range(count)]


def batches(steps: int, dtype: torch.dtype = torch.float64, rows: int = BATCH) -> list[Batch]:
    """Inputs and target of each step: of all replicas, one after another."""
    generator = torch.Generator().manual_seed(5)
    shape = (2, rows, WIDTH)
    drawn = [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(steps)]
    return [(x, y) for x, y in drawn]


def part(batch: Batch, world: r.World) -> Batch:
    """The part of the batch that this rank's replica takes."""
    x, y = (whole.tensor_split(world.topology.dp)[world.place.dp] for whole in batch)
    return x, y


async def train(
    model: Sequence[nn.Module],
    topology: r.Topology,
    steps: Sequence[Batch],
    *,
    folder: Path | None = None,
    wrap: Callable[[int], Wrap] = lambda _rank: lambda world: world,
    loss_fn: Callable[[Any, Any], Any] = nn.functional.mse_loss,
    updates: Callable[[int], bool] = lambda _step: True,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """Train copies of `model` on every replica; `wrap` changes the world of each rank."""
    run = Run([{} for _ in range(topology.world_size)])

    async def main(world: r.World) -> list[r.StepResult]:
        held = {s: copy.deepcopy(model[s]) for s in topology.stages_of(world.place.pp)}
        run.stages[world.rank] = held
        config = r.Config(**{"microbatches": 4, "trace_dir": folder, **settings})
        async with r.Runtime(
            list(held.values()),
            world=wrap(world.rank)(world),
            config=config,
            loss_fn=loss_fn,
            **copy.deepcopy(options or {}),
        ) as runtime:
            results = []
            for number, batch in enumerate(steps):
                x, y = part(batch, world)
                results.append(await runtime.train_step(x, target=y, update=updates(number)))
            return results

    run.results = await r.run_local(topology.world_size, main, topology=topology)
    return run


def gradients(stages: dict[int, nn.Module]) -> dict[str, Tensor | None]:
    """All gradients, by stage and name."""
    return {
        f"{stage}.{name}": parameter.grad
        for stage, held in sorted(stages.items())
        for name, parameter in held.named_parameters()
    }


def differences(
    one: dict[str, Tensor | None], other: dict[str, Tensor | None], within: float = 0.0
) -> list[str]:
    """The names under which they differ, bit for bit unless `within` allows more."""
    assert one.keys() == other.keys()
    return [name for name in one if not _same(one[name], other[name], within)]


def _same(one: Tensor | None, other: Tensor | None, within: float) -> bool:
    if one is None or other is None:
        return one is other
    return bool((one - other).abs().max() <= within) if within else torch.equal(one, other)

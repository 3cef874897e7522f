"""A pipeline that can be cut anywhere: eight layers under their unpartitioned names."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import rrfp_async as r

LAYERS = 8
WIDTH = 6
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Counting(nn.Module):
    """A linear layer that counts the samples it has seen, and keeps a scratch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.seen += len(hidden)
        return self.linear(hidden)


def layers(seed: int = 0) -> dict[str, nn.Module]:
    """The unpartitioned model's layers by name."""
    torch.manual_seed(seed)
    made = [Counting() if i % 3 == 0 else nn.Linear(WIDTH, WIDTH) for i in range(LAYERS)]
    made[3].linear.bias.requires_grad_(requires_grad=False)
    return {str(index): layer for index, layer in enumerate(made)}


def cut(stages: int, seed: int = 0) -> list[nn.Module]:
    """The layers in so many stages, each of at least one."""
    named = list(layers(seed).items())
    bounds = [LAYERS * index // stages for index in range(stages + 1)]
    return [nn.Sequential(OrderedDict(named[low:high])) for low, high in pairwise(bounds)]


def whole(seed: int = 0) -> nn.Sequential:
    """The unpartitioned model."""
    return nn.Sequential(OrderedDict(layers(seed)))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Keeps no state."""
    return torch.optim.SGD(parameters, lr=0.05)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Keeps a buffer per parameter."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Keeps two moments and a step."""
    return torch.optim.Adam(parameters, lr=0.01)


def adamw_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Decays matrices, not biases; on some ranks a group may be empty."""
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.002},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


OPTIMIZERS = {"sgd": sgd, "momentum": momentum, "adam": adam, "adamw_groups": adamw_groups}


@dataclass(frozen=True)
class Grid:
    """How many ranks, and stages on each."""

    ranks: int
    chunks: int = 1

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def topology(self) -> r.Topology:
        return r.Topology(self.ranks, None, self.chunks)


def build(
    world: r.World, stages: list[nn.Module], make: MakeOptimizer | None, **more: Any
) -> r.Runtime:
    """The Runtime of one rank."""
    settings = {"microbatches": 2, **more.pop("settings", {})}
    return r.Runtime(
        [stages[stage] for stage in world.topology.stages_of(world.rank)],
        world=world,
        config=r.Config(**settings),
        loss_fn=nn.functional.mse_loss,
        optimizer=make,
        **more,
    )


async def step(runtime: r.Runtime, **more: Any) -> float | None:
    """The next training step; its data hang on how many there were."""
    draw = torch.Generator().manual_seed(runtime.steps_trained)
    inputs, target = torch.randn(2, 4, WIDTH, generator=draw).unbind()
    return (await runtime.train_step(inputs, target=target, **more)).loss


def values(stages: list[nn.Module]) -> dict[str, Tensor]:
    """A copy of every parameter and persistent buffer, by unpartitioned name."""
    states = [stage.state_dict() for stage in stages]
    return {name: value.clone() for state in states for name, value in state.items()}


def differing(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """The names whose values are not equal bit for bit."""
    names = sorted(first.keys() | second.keys())
    return [n for n in names if n not in first or n not in second or not same(first[n], second[n])]


def same(first: Tensor, second: Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    return first.dtype == second.dtype and torch.equal(first, second)


@dataclass
class Life:
    """What a run came to.

    Attributes:
        losses: Of its steps.
        values: Parameters and buffers at its end.
        extra: What `load` returned on rank 0.
    """

    losses: list[float | None] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


async def live(
    grid: Grid,
    make: MakeOptimizer | None,
    steps: int,
    *,
    load: Any = None,
    save: Any = None,
    seed: int = 0,
    **more: Any,
) -> Life:
    """Build the pipeline, load, train so many steps, save."""
    stages, life = cut(grid.stages, seed), Life()

    async def main(world: r.World) -> None:
        async with build(world, stages, make, **more) as runtime:
            extra = {} if load is None else await runtime.load(load)
            losses = [await step(runtime) for _ in range(steps)]
            if save is not None:
                await runtime.save(save)
            if world.rank == 0:
                life.losses, life.extra = losses, extra

    await r.run_local(grid.ranks, main, topology=grid.topology())
    life.values = values(stages)
    return life

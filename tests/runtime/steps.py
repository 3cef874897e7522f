"""One call per rank on a small pipeline, and who must be told when it goes wrong."""

import asyncio
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rrfp_async as r
from tests.runtime.parity import linear_stages
from tests.runtime.worlds import each_rank

mse_loss = nn.functional.mse_loss
Call = Callable[[r.Runtime], Any]


def whole() -> Tensor:
    """A batch of 8 vectors."""
    return torch.ones(8, 8)


async def train(runtime: r.Runtime) -> Any:
    """A good training step."""
    return await runtime.train_step(whole(), target=whole())


async def run_steps(*calls: Call, **settings: Any) -> list[Any]:
    """One step on as many ranks as there are calls, each its own; what each rank raised.

    A setting that is a list is by rank, else it is for all.
    """
    stages = settings.pop("stages", None) or linear_stages(len(calls))

    async def main(world: r.World) -> Any:
        mine = {k: v[world.rank] if isinstance(v, list) else v for k, v in settings.items()}
        options = mine.pop("options", {})
        mine.setdefault("loss_fn", mse_loss)
        config = r.Config(**{"microbatches": 4, **options})
        runtime = r.Runtime(stages[world.rank], world=world, config=config, **mine)
        async with runtime:
            return await calls[world.rank](runtime)

    async with asyncio.timeout(5.0):
        return await each_rank(len(calls), main)


def assert_told(errors: list[Any], rank: int, kind: type[Exception], message: str) -> None:
    """`rank` raised `kind`, every other rank a StepFailed that names it and the message."""
    assert isinstance(errors[rank], kind), errors[rank]
    assert message in str(errors[rank])
    for other, error in enumerate(errors):
        if other != rank:
            assert isinstance(error, r.StepFailed), (other, error)
            assert error.rank == rank
            assert message in error.cause


async def evaluate(runtime: r.Runtime) -> Any:
    """A good evaluation."""
    return await runtime.eval_step(whole(), target=whole())

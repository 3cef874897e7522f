"""Stages that write to their inputs, also where no gradient is wanted."""

import asyncio
import copy

import pytest
import torch
from torch import nn

import rrfp_async as r

STEPS = 20


def stages(*, frozen: bool) -> list[nn.Module]:
    """A linear stage, then two that begin with an in-place ReLU."""
    torch.manual_seed(3)
    made = [nn.Linear(8, 8), *(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)) for _ in "ab")]
    made[0].requires_grad_(not frozen)
    return made


@pytest.mark.parametrize("frozen", [False, True])
async def test_an_activation_that_needs_no_gradient_may_be_written_to(frozen: bool) -> None:
    """In evaluation, and below the first trainable stage: no error, and the model's outputs."""
    modules = stages(frozen=frozen)
    model = nn.Sequential(*copy.deepcopy(modules))
    batch = torch.randn(8, 8)

    async def main(world: r.World) -> list[torch.Tensor]:
        config, loss_fn = r.Config(microbatches=4), nn.functional.mse_loss
        module = modules[world.rank]
        async with r.Runtime(module, world=world, config=config, loss_fn=loss_fn) as runtime:
            for _ in range(STEPS):
                await runtime.train_step(batch, target=batch)
                result = await runtime.eval_step(batch)
        return result.outputs

    outputs = (await r.run_local(3, main))[-1]
    with torch.no_grad():
        expected = [model(part) for part in batch.tensor_split(4)]
    assert all(map(torch.equal, outputs, expected))
    for module in modules:
        assert all((p.grad is None) is not p.requires_grad for p in module.parameters())


async def test_an_error_between_steps_is_told_to_the_other_ranks() -> None:
    """A rank whose program fails outside a step is named with its error, not with its absence."""

    async def main(world: r.World) -> None:
        config = r.Config(microbatches=2)
        async with r.Runtime(nn.Linear(4, 4), world=world, config=config) as runtime:
            await runtime.eval_step(torch.ones(2, 4))
            if world.rank == 1:
                raise KeyError("no such column")
            with pytest.raises(r.StepFailed, match="rank 1: KeyError: 'no such column'"):
                await runtime.eval_step(torch.ones(2, 4))

    async with r.local_world(2) as worlds:
        ends = await asyncio.gather(*map(main, worlds), return_exceptions=True)
    assert ends[0] is None
    assert isinstance(ends[1], KeyError)

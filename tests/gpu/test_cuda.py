"""The same Runtime over a GPU: ranks of one process, each on a stream of its own."""

import pytest
import torch

import rrfp_async
from rrfp_async.world import World

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and there is none"),
]
RANKS, MICROBATCHES, WIDTH = 4, 8, 256


def stage(rank: int) -> torch.nn.Module:
    """The stage of `rank` on the GPU, always the same."""
    torch.manual_seed(rank)
    layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())
    return layers.to("cuda", torch.float64)


def batch() -> torch.Tensor:
    """The same inputs and targets everywhere."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(64, WIDTH, generator=generator, dtype=torch.float64).cuda()


def reference() -> list[torch.Tensor]:
    """Every gradient of the unpartitioned model, on the GPU."""
    model = torch.nn.Sequential(*map(stage, range(RANKS)))
    data = batch()
    for part in data.tensor_split(MICROBATCHES):
        (torch.nn.functional.mse_loss(model(part), part) * (len(part) / len(data))).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("hint", ["bf", "fb", "b-priority", "f-priority"])
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_pipeline_of_streams_has_the_gradients_of_the_unpartitioned_model(
    hint: str, seed: int
) -> None:
    """Bitwise, over three steps, whatever the arrival order was."""

    async def main(world: World) -> list[torch.Tensor]:
        module = stage(world.rank)
        shaken = rrfp_async.with_delays(world, rrfp_async.Delays(seed))
        config = rrfp_async.Config(microbatches=MICROBATCHES, hint=hint)
        async with rrfp_async.Runtime(
            module, world=shaken, config=config, loss_fn=torch.nn.functional.mse_loss
        ) as runtime:
            for _ in range(3):
                await runtime.train_step(batch(), target=batch())
        return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]

    by_rank = await rrfp_async.run_local(RANKS, main, device="cuda")
    gradients = [gradient for gradients in by_rank for gradient in gradients]
    assert len(gradients) == 2 * RANKS
    assert all(map(torch.equal, gradients, reference()))


async def test_train_step_returns_when_the_gradients_are_there() -> None:
    """A read on another stream right after the step sees the finished gradient."""

    async def main(world: World) -> float:
        module = stage(world.rank)
        config = rrfp_async.Config(microbatches=2)
        async with rrfp_async.Runtime(
            module, world=world, config=config, loss_fn=torch.nn.functional.mse_loss
        ) as runtime:
            await runtime.train_step(batch(), target=batch())
        with torch.cuda.stream(torch.cuda.Stream()):
            return sum(float(p.grad.abs().sum()) for p in module.parameters() if p.grad is not None)

    sums = await rrfp_async.run_local(1, main, device="cuda")
    assert sums[0] > 0.0

"""Hazard 11: what a stage draws depends on seed, step, stage and microbatch, never on order."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rrfp_async as r
from tests.runtime.parity import assert_parity, chain_case, differences, pipelined
from tests.runtime.reference import Case, Step


class Dropping(nn.Module):
    """A layer and dropout, recomputed in the backward if `again`."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            out: Tensor = checkpoint(self.layer, x, use_reentrant=False)
            return out
        return self.layer(x)


def case_of(stages: int, *, again: bool = False, **options: Any) -> Case:
    """Three steps of dropping stages."""
    torch.manual_seed(2)
    modules = [Dropping(again=again) for _ in range(stages)]
    steps = [Step({0: (torch.randn(8, 8),)}, torch.randn(8, 8)) for _ in range(3)]
    return Case(modules, steps, 4, options={"seed": 17, **options})


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("hint", ["bf", "bfw", "auto"])
async def test_dropout_does_not_depend_on_the_order(again: bool, hint: str, tmp_path: Path) -> None:
    """Ten arrival orders, bitwise the reference's losses and gradients."""
    await assert_parity(case_of(3, again=again, hint=hint), tmp_path, seeds=range(10))


async def test_dropout_of_chunks_does_not_depend_on_the_order(tmp_path: Path) -> None:
    """Two stages a rank, in a V."""
    case = replace(case_of(4, hint="zbv"), chunks=2, placement="v")
    await assert_parity(case, tmp_path, seeds=range(5))


async def test_evaluations_do_not_move_the_streams(tmp_path: Path) -> None:
    """Hazard 7, with dropout: training steps between evaluations draw what they do without."""
    case = case_of(2)
    evaluation = replace(case.steps[0], training=False)
    mixed = [evaluation, case.steps[0], evaluation, evaluation, *case.steps[1:]]
    plain = await pipelined(case, tmp_path / "plain")
    run = await pipelined(replace(case, steps=mixed), tmp_path / "mixed")
    training = [outcome for outcome, step in zip(run.outcomes, mixed, strict=True) if step.training]
    assert differences(plain.outcomes, training) == []


async def test_microbatches_and_steps_draw_different_masks(tmp_path: Path) -> None:
    """Else every microbatch would drop the same units."""
    seen: list[Tensor] = []

    class Seen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.rand(4))
            return x

    case = chain_case(1, microbatches=4, stages=[Seen()], options={"seed": 1})
    await pipelined(replace(case, steps=case.steps * 2), tmp_path)
    assert len({tuple(drawn.tolist()) for drawn in seen}) == 8


async def test_ranks_take_the_first_ones_seed(tmp_path: Path) -> None:
    """Without Config.seed it is the first rank's torch seed; masks then follow manual_seed."""
    case = replace(case_of(2), options={})
    torch.manual_seed(17)
    run = await pipelined(case, tmp_path / "unset")
    torch.manual_seed(18)
    with_seed = replace(case, options={"seed": 17})
    again = await pipelined(with_seed, tmp_path / "set")
    other = await pipelined(case, tmp_path / "other")
    assert differences(run.outcomes, again.outcomes) == []
    assert differences(run.outcomes, other.outcomes) != []


async def test_what_the_user_draws_is_the_user_s(tmp_path: Path) -> None:
    """Batches drawn beside the pipeline are what they are without it, on every rank."""
    topology = r.Topology(4)
    torch.manual_seed(3)
    stages = [Dropping(again=rank % 2 == 1) for rank in range(4)]
    seen: dict[int, list[Tensor]] = {}

    async def main(world: r.World) -> None:
        config = r.Config(microbatches=4, trace_dir=tmp_path, seed=5)
        async with r.Runtime(
            stages[world.rank], world=world, config=config, loss_fn=nn.functional.mse_loss
        ) as runtime:
            for step in range(4):
                await asyncio.sleep(0)
                torch.manual_seed(100 + step)
                x, y = torch.randn(8, 8), torch.randn(8, 8)
                seen.setdefault(world.rank, []).append(torch.cat([x, y]))
                await runtime.train_step(x, target=y)

    for _ in range(5):
        seen.clear()
        await r.run_local(4, main, topology=topology)
        for drawn in seen.values():
            for step, value in enumerate(drawn):
                torch.manual_seed(100 + step)
                assert torch.equal(value, torch.cat([torch.randn(8, 8), torch.randn(8, 8)]))


async def test_a_checkpoint_goes_on_with_the_streams(tmp_path: Path) -> None:
    """Three steps, save, load into new modules, three steps: bitwise six, masks included."""

    async def train(stages: list[nn.Module], steps: int, **where: Path) -> list[float | None]:
        torch.manual_seed(int(torch.randint(0, 999, ())))  # a seed that the load must overrule

        async def main(world: r.World) -> list[float | None]:
            async with r.Runtime(
                stages[world.rank],
                world=world,
                config=r.Config(microbatches=4),
                loss_fn=nn.functional.mse_loss,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
                names=lambda stage, name: f"{stage}.{name}",
            ) as runtime:
                if "load" in where:
                    await runtime.load(where["load"])
                generator = torch.Generator().manual_seed(runtime.steps_trained)
                losses = []
                for _ in range(steps):
                    x, y = torch.randn(2, 8, 8, generator=generator).unbind()
                    losses.append((await runtime.train_step(x, target=y)).loss)
                    if "save" in where and runtime.steps_trained == 3:
                        await runtime.save(where["save"])
                    generator.manual_seed(runtime.steps_trained)
                return losses

        return (await r.run_local(2, main))[0]

    def fresh(seed: int) -> list[nn.Module]:
        torch.manual_seed(seed)
        return [Dropping(again=False) for _ in range(2)]

    first, second = fresh(1), fresh(2)
    whole = await train(first, 6, save=tmp_path / "saved")
    resumed = await train(second, 3, load=tmp_path / "saved")
    assert resumed == whole[3:]
    for one, two in zip(first, second, strict=True):
        assert all(map(torch.equal, one.parameters(), two.parameters()))


@pytest.mark.parametrize("seed", [-1, 1.5, "x", 2**64, True])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    """The message names the range."""
    with pytest.raises(ValueError, match=r"seed=.* must be an int of 0 to 2\*\*64 - 1"):
        r.Config(microbatches=1, seed=seed)

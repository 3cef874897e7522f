"""What a step returns and leaves, on one rank and on many."""

import asyncio
import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rrfp_async as r
from tests.runtime.parity import (
    assert_parity,
    build,
    chain_case,
    differences,
    linear_stages,
    pipelined,
    shaken,
)
from tests.runtime.reference import Case, Step, gradients_of, run_reference
from tests.runtime.worlds import each_rank

mse_loss = nn.functional.mse_loss


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Momentum makes a wrong step show in the next."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _batches(count: int, *, samples: int = 8) -> list[Step]:
    torch.manual_seed(31)
    return [Step({0: (torch.randn(samples, 8),)}, torch.randn(samples, 8)) for _ in range(count)]


async def test_the_loss_is_the_same_on_every_rank_and_details_on_the_last(tmp_path: Path) -> None:
    """One float everywhere; losses and outputs only where the last stage is."""
    case = chain_case(3, microbatches=4)
    run = await pipelined(case, tmp_path)
    [expected] = run_reference(case)
    assert [result.loss for [result] in run.results] == [expected.loss] * 3
    assert [len(result.losses) for [result] in run.results] == [0, 0, 4]
    assert [len(result.outputs) for [result] in run.results] == [0, 0, 4]
    outputs = run.results[2][0].outputs
    assert all(map(torch.equal, outputs, expected.outputs))
    assert not any(output.requires_grad for output in outputs)


@pytest.mark.parametrize("seed", range(5))
async def test_a_rank_s_time_splits_into_four_that_sum(tmp_path: Path, seed: int) -> None:
    """Compute + blocking + coordination + other is step_s within 1e-9, and none is negative."""
    case = chain_case(4, microbatches=4, make_optimizer=sgd)
    case = replace(case, steps=[*_batches(2), replace(_batches(1)[0], training=False)])
    run = await pipelined(case, tmp_path, wrap=shaken(seed))
    for result in (result for rank in run.results for result in rank):
        parts = (result.compute_s, result.blocking_s, result.coordination_s, result.other_s)
        assert min(parts) >= 0.0
        assert abs(sum(parts) - result.step_s) < 1e-9
        assert result.compute_s > 0.0


async def test_a_made_optimizer_steps_as_the_reference_s_does(tmp_path: Path) -> None:
    """Three steps of SGD with momentum, one factory per rank: losses and gradients bitwise."""
    case = replace(chain_case(3, microbatches=4), steps=_batches(3), make_optimizer=sgd)
    runs = await assert_parity(case, tmp_path, seeds=range(5))
    assert len({outcome.loss for outcome in runs[0].outcomes}) == 3


async def test_an_optimizer_may_be_an_instance() -> None:
    """An optimizer given ready-made is the one that steps, and can be reached for a scheduler."""
    stages = linear_stages(2)
    before = copy.deepcopy(stages)
    optimizers = [torch.optim.SGD(stage.parameters(), lr=0.1) for stage in stages]

    async def main(world: r.World) -> None:
        config, optimizer = r.Config(microbatches=2), optimizers[world.rank]
        runtime = r.Runtime(
            stages[world.rank], world=world, config=config, loss_fn=mse_loss, optimizer=optimizer
        )
        assert runtime.optimizer is optimizer
        async with runtime:
            args = (torch.ones(4, 8),) if world.rank == 0 else ()
            await runtime.train_step(*args, target=torch.ones(4, 8))

    await r.run_local(2, main)
    for old, new in zip(_parameters(before), _parameters(stages), strict=True):
        assert torch.equal(new, torch.add(old, new.grad, alpha=-0.1))


def _parameters(stages: list[nn.Module]) -> Iterator[nn.Parameter]:
    for stage in stages:
        yield from stage.parameters()


async def test_a_rank_without_parameters_needs_no_optimizer() -> None:
    """The factory is not asked where there is nothing to optimize."""

    async def main(world: r.World) -> Any:
        stage = nn.Linear(8, 8) if world.rank == 0 else nn.Tanh()
        config = r.Config(microbatches=2)
        runtime = r.Runtime(stage, world=world, config=config, loss_fn=mse_loss, optimizer=sgd)
        async with runtime:
            args = (torch.ones(4, 8),) if world.rank == 0 else ()
            await runtime.train_step(*args, target=torch.ones(4, 8))
        return runtime.optimizer

    first, second = await r.run_local(2, main)
    assert isinstance(first, torch.optim.SGD)
    assert second is None


async def test_steps_without_update_accumulate(tmp_path: Path) -> None:
    """update=False, twice, then an update: bitwise what the reference accumulates."""
    steps = [replace(step, update=i % 3 == 2) for i, step in enumerate(_batches(6))]
    case = replace(chain_case(3, microbatches=4), steps=steps, make_optimizer=sgd)
    runs = await assert_parity(case, tmp_path, seeds=range(8))
    one = runs[0].outcomes[0].gradients["stage 0 0.weight"]
    two = runs[0].outcomes[1].gradients["stage 0 0.weight"]
    assert not torch.equal(one, two)


async def test_an_evaluation_between_does_not_end_an_accumulation(tmp_path: Path) -> None:
    """update=False, eval, step: the second step still adds to the first."""
    first, middle, last = _batches(3)
    steps = [replace(first, update=False), replace(middle, training=False), last]
    case = replace(chain_case(3, microbatches=4), steps=steps, make_optimizer=sgd)
    await assert_parity(case, tmp_path, seeds=range(4))


class Observed(nn.Module):
    """Notes, whenever it runs, whether it has gradients and trains."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.linear.weight.grad is not None, self.training))
        return self.linear(x)


async def test_gradients_last_until_the_next_first_accumulation() -> None:
    """After a step they can be read; the next step's first forward still sees them."""
    stage = Observed()
    async with r.local_world(1) as [world]:
        config = r.Config(microbatches=2, limit=1)
        async with r.Runtime(stage, world=world, config=config, loss_fn=mse_loss) as runtime:
            x, y = torch.randn(4, 8), torch.randn(4, 8)
            await runtime.train_step(x, target=y)
            first = gradients_of([stage])
            await runtime.train_step(x, target=y)
            second = gradients_of([stage])
    assert [has for has, _ in stage.seen] == [False, True, True, True]
    assert all(torch.equal(first[name], second[name]) for name in first), "not zeroed, or twice"


async def test_an_evaluation_leaves_gradients_and_modes_as_they_were() -> None:
    """eval_step runs in eval mode and without autograd; modes come back one by one."""
    stage = nn.Sequential(Observed(), nn.Dropout(0.5), nn.Linear(8, 8))
    stage[1].eval()
    async with r.local_world(1) as [world]:
        config = r.Config(microbatches=2)
        async with r.Runtime(stage, world=world, config=config, loss_fn=mse_loss) as runtime:
            x, y = torch.randn(4, 8), torch.randn(4, 8)
            await runtime.train_step(x, target=y)
            held = [parameter.grad for parameter in stage.parameters()]
            before = gradients_of([stage])
            stage[0].seen.clear()
            result = await runtime.eval_step(x, target=y)
    assert [trains for _, trains in stage[0].seen] == [False, False]
    assert [module.training for module in stage.modules()][-3:] == [True, False, True]
    after = gradients_of([stage])
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(a is p.grad for a, p in zip(held, stage.parameters(), strict=True))
    assert not any(output.requires_grad for output in result.outputs)


async def test_an_evaluation_without_a_target_has_no_loss(tmp_path: Path) -> None:
    """Outputs come without a loss on every rank."""
    step = replace(_batches(1)[0], target=None, training=False)
    case = replace(chain_case(3, microbatches=4), steps=[step])
    run = await pipelined(case, tmp_path)
    assert [(result.loss, result.losses) for [result] in run.results] == [(None, [])] * 3
    assert len(run.results[2][0].outputs) == 4


async def test_runtimes_one_after_another_share_a_world() -> None:
    """The second Runtime of every rank starts afresh on the same devices."""
    case = chain_case(3, microbatches=4)

    async def main(world: r.World) -> list[float | None]:
        losses = []
        for _ in range(3):
            async with build(case, list(case.stages), world, None) as runtime:
                args = case.steps[0].inputs.get(world.rank, ())
                losses.append((await runtime.train_step(*args, target=case.steps[0].target)).loss)
        return losses

    expected = run_reference(case)[0].loss
    assert await each_rank(3, main) == [[expected] * 3] * 3


async def test_a_new_runtime_follows_a_failed_one() -> None:
    """After a failure everywhere, the next Runtime of the same world works."""
    case = chain_case(3, microbatches=4)

    async def main(world: r.World) -> float | None:
        async with build(case, list(case.stages), world, None) as runtime:
            with pytest.raises((ValueError, r.StepFailed)):
                await runtime.train_step(torch.ones(1, 8), target=case.steps[0].target)
        async with build(case, list(case.stages), world, None) as runtime:
            args = case.steps[0].inputs.get(world.rank, ())
            return (await runtime.train_step(*args, target=case.steps[0].target)).loss

    assert await each_rank(3, main) == [run_reference(case)[0].loss] * 3


async def test_two_runtimes_at_once_share_a_world() -> None:
    """Two models trained side by side over the same devices: each as if alone."""
    cases = [chain_case(3, microbatches=4), chain_case(3, microbatches=3, batch=6)]
    stages = [copy.deepcopy(list(case.stages)) for case in cases]

    async def step(case: Case, runtime: r.Runtime, rank: int) -> float | None:
        args = case.steps[0].inputs.get(rank, ())
        return (await runtime.train_step(*args, target=case.steps[0].target)).loss

    async def main(world: r.World) -> list[float | None]:
        one = build(cases[0], stages[0], world, None)
        two = build(cases[1], stages[1], world, None)
        async with one, two:
            return await asyncio.gather(
                step(cases[0], one, world.rank), step(cases[1], two, world.rank)
            )

    losses = await r.run_local(3, main)
    expected = [run_reference(case)[0] for case in cases]
    assert losses == [[outcome.loss for outcome in expected]] * 3
    for outcome, trained in zip(expected, stages, strict=True):
        got = replace(outcome, gradients=gradients_of(trained))
        assert differences([outcome], [got]) == []


@pytest.mark.parametrize("microbatches", [1, 3, 8])
async def test_one_rank_is_a_pipeline_too(tmp_path: Path, microbatches: int) -> None:
    """pp=1: no peer, no transfer, parity."""
    case = replace(chain_case(1, microbatches=microbatches), steps=_batches(2), make_optimizer=sgd)
    await assert_parity(case, tmp_path, seeds=range(3), orders_differ=False)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 16])
async def test_many_ranks_keep_parity(tmp_path: Path, ranks: int) -> None:
    """A longer chain than this machine has cores."""
    case = replace(chain_case(ranks, microbatches=24, batch=48), steps=_batches(2, samples=48))
    await assert_parity(case, tmp_path, seeds=range(5))


async def test_an_opened_runtime_that_is_dropped_warns() -> None:
    """Leaking a Runtime is a ResourceWarning; `close` is what was missing."""
    async with r.local_world(1) as [world]:
        runtime = r.Runtime(nn.Linear(8, 8), world=world, config=r.Config(microbatches=1))
        await runtime.__aenter__()
        with pytest.warns(ResourceWarning, match="never closed"):
            runtime.__del__()
        await runtime.close()


async def test_leaving_a_world_fails_the_step_that_still_runs_in_it() -> None:
    """A step whose local_world is left gets an error instead of waiting for ever."""
    async with r.local_world(2) as worlds:
        runtime = r.Runtime(nn.Linear(8, 8), world=worlds[0], config=r.Config(microbatches=1))
        await runtime.__aenter__()
        step = asyncio.create_task(runtime.train_step(torch.ones(1, 8)))
        await asyncio.sleep(0)
    async with asyncio.timeout(5.0):
        with pytest.raises(r.StepFailed, match="closed"):
            await step
    await runtime.close()

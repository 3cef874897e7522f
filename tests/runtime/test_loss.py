"""The loss: mean over samples, sum, over tokens; in full precision whatever computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rrfp_async as r
from rrfp_async.tasks.loss import Loss
from tests.runtime.parity import assert_parity, chain_case, pipelined
from tests.runtime.reference import Case, Step, run_reference

WORDS = 7


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)


def language_case(target: Tensor, *, hint: str = "auto", microbatches: int = 3) -> Case:
    """Two stages of a tiny language model in float64."""
    torch.manual_seed(3)
    stages = [
        nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 8)).double(),
        nn.Linear(8, WORDS).double(),
    ]
    x = torch.randint(0, WORDS, target.shape)
    step = Step({0: (x,)}, target)
    options = {"hint": hint}
    count = r.TokenMean(-100)
    return Case(stages, [step], microbatches, token_loss, options=options, count=count)


def target_with(ignored: list[int]) -> Tensor:
    """Six rows of five tokens, of which `ignored` of each row are not counted."""
    target = torch.randint(0, WORDS, (6, 5), generator=torch.Generator().manual_seed(2))
    for row, count in enumerate(ignored):
        target[row, :count] = -100
    return target


@pytest.mark.parametrize("hint", ["bf", "bfw"])
async def test_a_token_weighted_loss_is_that_of_the_whole_batch(hint: str, tmp_path: Path) -> None:
    """Microbatches count by their tokens: bitwise the reference, within 1e-12 the whole batch."""
    target = target_with([0, 4, 1, 2, 5, 3])
    case = language_case(target, hint=hint)
    [run, *_] = await assert_parity(case, tmp_path, seeds=range(4), orders_differ=False)
    whole = nn.Sequential(*case.stages)
    loss = token_loss(whole(case.steps[0].inputs[0][0]), target)
    loss.backward()
    assert run.outcomes[0].loss == pytest.approx(loss.item(), abs=1e-12)
    wanted = {
        f"stage {index} {name}": parameter.grad
        for index, stage in enumerate(case.stages)
        for name, parameter in stage.named_parameters()
    }
    for name, gradient in run.outcomes[0].gradients.items():
        assert (gradient - wanted[name]).abs().max() < 1e-12, name


@pytest.mark.parametrize("hint", ["bf", "bfw", "zb-h1"])
async def test_a_microbatch_of_ignored_tokens_contributes_nothing(
    hint: str, tmp_path: Path
) -> None:
    """No NaN, in the loss or a gradient: as if the microbatch were not there."""
    target = target_with([0, 1, 5, 5, 2, 0])
    run = await pipelined(language_case(target, hint=hint), tmp_path)
    kept = torch.tensor([0, 1, 4, 5])
    case = language_case(target, hint=hint)
    rows = case.steps[0].inputs[0][0][kept]
    alone = Case(case.stages, [Step({0: (rows,)}, target[kept])], 2, token_loss, count=case.count)
    [expected] = run_reference(alone)
    [got] = run.outcomes
    assert got.losses[1] == 0.0
    assert got.loss == expected.loss
    for name, gradient in expected.gradients.items():
        assert torch.equal(got.gradients[name], gradient), name


async def test_a_batch_of_ignored_tokens_is_a_loss_of_zero(tmp_path: Path) -> None:
    """And no gradient at all."""
    run = await pipelined(language_case(target_with([5] * 6)), tmp_path)
    assert run.outcomes[0].loss == 0.0
    assert set(map(type, run.outcomes[0].gradients.values())) == {type(None)}


def build(world: r.World, stage: nn.Module, **more: Any) -> r.Runtime:
    return r.Runtime(stage, world=world, config=r.Config(microbatches=3), **more)


async def test_a_sum_is_a_sum() -> None:
    """With loss_reduction="sum" microbatches are added, whatever their sizes."""
    torch.manual_seed(1)
    stages = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)]
    x, y = torch.randn(2, 8, 4, dtype=torch.float64).unbind()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target, reduction="sum")

    async def main(world: r.World) -> float | None:
        async with build(
            world, stages[world.rank], loss_fn=loss_fn, loss_reduction="sum"
        ) as runtime:
            return (await runtime.train_step(x, target=y)).loss

    losses = await r.run_local(2, main)
    gradient = stages[0].weight.grad
    stages[0].weight.grad = None
    loss = loss_fn(stages[1](stages[0](x)), y)
    loss.backward()
    assert losses == [pytest.approx(loss.item(), abs=1e-12)] * 2
    assert (gradient - stages[0].weight.grad).abs().max() < 1e-12


@pytest.mark.parametrize("reduction", ["median", 3, None])
async def test_what_is_no_reduction_is_refused(reduction: Any) -> None:
    """The message lists what there is."""
    async with r.local_world(1) as [world]:
        with pytest.raises(ValueError, match=r"loss_reduction=.* must be 'mean', 'sum', or a func"):
            build(world, nn.Linear(1, 1), loss_reduction=reduction)


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf")])
async def test_a_count_that_is_none_is_told(count: float) -> None:
    """As the failure of the last stage's first forward."""
    loss = Loss(nn.functional.mse_loss, lambda _target: count)
    loss.begin_step([torch.zeros(2)], [2])
    with pytest.raises(ValueError, match="loss_reduction counted"):
        loss.root(0, torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
async def test_the_loss_is_computed_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    """A stage of half precision hands its output to the loss function in full."""
    seen = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.dtype)
        return nn.functional.mse_loss(output, target)

    torch.manual_seed(1)
    stages = [nn.Linear(8, 8, dtype=dtype) for _ in range(2)]
    steps = [Step({0: (torch.randn(6, 8, dtype=dtype),)}, torch.randn(6, 8))]
    case = Case(stages, steps, 3, loss_fn)
    run = await pipelined(case, tmp_path)
    assert set(seen) == {torch.float32}
    in_full = chain_case(2, microbatches=3, stages=stages, steps=steps)
    [expected] = run_reference(
        Case(in_full.stages, steps, 3, lambda o, t: nn.functional.mse_loss(o.float(), t))
    )
    assert run.outcomes[0].loss == expected.loss
    for name, gradient in expected.gradients.items():
        assert torch.equal(run.outcomes[0].gradients[name], gradient), name

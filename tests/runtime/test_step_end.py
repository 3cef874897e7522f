"""Hazard 15 and mixed precision: one norm, one factor, one scale, on all ranks."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rrfp_async as r

STEPS, LR, MOST = 4, 0.1, 0.5


def model(stages: int = 3, scale: float = 100.0) -> list[nn.Module]:
    """Linear stages; the first one's gradients are a hundred times the others'."""
    torch.manual_seed(4)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(stages)]
    return [nn.Sequential(_Louder(scale), layers[0]), *layers[1:]]


class _Louder(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def batch() -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1)).unbind()
    return x, y


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


async def train(
    stages: list[nn.Module],
    topology: r.Topology,
    *,
    scalers: list[torch.amp.GradScaler] | None = None,
    steps: int = STEPS,
    loss_fn: Any = nn.functional.mse_loss,
    max_grad_norm: float | None = MOST,
    **options: Any,
) -> list[list[r.StepResult]]:
    """Results by rank."""
    x, y = batch()

    async def main(world: r.World) -> list[r.StepResult]:
        async with r.Runtime(
            [stages[stage] for stage in topology.stages_of(world.rank)],
            world=world,
            config=r.Config(microbatches=2, **options),
            loss_fn=loss_fn,
            optimizer=sgd,
            max_grad_norm=max_grad_norm,
            grad_scaler=None if scalers is None else scalers[world.rank],
        ) as runtime:
            return [await runtime.train_step(x, target=y) for _ in range(steps)]

    return await r.run_local(topology.world_size, main, topology=topology)


def reference(
    stages: list[nn.Module], scaler: torch.amp.GradScaler | None = None, *, steps: int = STEPS
) -> list[float]:
    """The norms of unpartitioned training with torch's own clipping and scaling."""
    whole = nn.Sequential(*stages)
    optimizer = sgd(list(whole.parameters()))
    x, y = batch()
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        for part, target in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
            loss = nn.functional.mse_loss(whole(part), target) * 0.5
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(whole.parameters(), MOST)))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return norms


def assert_same(ours: list[nn.Module], theirs: list[nn.Module]) -> None:
    """Every parameter and gradient, bit for bit."""
    for stage, other in zip(ours, theirs, strict=True):
        for (name, one), two in zip(stage.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two), name
            assert torch.equal(one.grad, two.grad), name


TOPOLOGIES = {
    "chain": r.Topology(3),
    "one rank": r.Topology(1, chunks=3),
}


@pytest.mark.parametrize("hint", ["bf", "bfw"])
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES.keys())
async def test_gradients_are_clipped_by_one_norm_of_all_ranks(
    topology: r.Topology, hint: str
) -> None:
    """Norm, gradients and parameters equal clip_grad_norm_ on the unpartitioned model."""
    ours, theirs = model(), model()
    results = await train(ours, topology, hint=hint)
    norms = reference(theirs)
    assert max(norms) > MOST
    for of_rank in results:
        assert [result.grad_norm for result in of_rank] == norms
    assert_same(ours, theirs)


async def test_the_norm_is_told_only_where_it_is_taken() -> None:
    """Without clipping, and after a step without an update."""
    [[result, *_], *_] = await train(model(), r.Topology(3), max_grad_norm=None, steps=1)
    assert result.grad_norm is None


def scalers(count: int, **more: Any) -> list[torch.amp.GradScaler]:
    settings = {"init_scale": 2.0**10, "growth_interval": 2, **more}
    return [torch.amp.GradScaler("cpu", **settings) for _ in range(count)]


async def test_a_scaler_changes_no_bit_of_an_update() -> None:
    """Scaled, unscaled, clipped and stepped as torch's GradScaler does on the whole model."""
    ours, theirs = model(scale=1.0), model(scale=1.0)
    own, [their] = scalers(3), scalers(1)
    results = await train(ours, r.Topology(3), scalers=own)
    norms = reference(theirs, their)
    assert [result.grad_norm for result in results[0]] == norms
    assert {scaler.get_scale() for scaler in own} == {their.get_scale()}
    assert their.get_scale() > 2.0**10
    assert_same(ours, theirs)


class _Planted(nn.Module):
    """Makes a gradient infinite in one step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.calls = 0
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        factor = float("inf") if self.calls == self.at else 1.0
        return x + (self.weight - self.weight.detach()) * factor


async def test_a_gradient_that_is_not_finite_skips_the_step_everywhere() -> None:
    """Found on one rank only: no rank updates, every scale backs off alike, training goes on."""
    stages = model(scale=1.0)
    stages[1] = nn.Sequential(stages[1], _Planted(at=3))  # of two microbatches, in step 1
    before: list[list[Tensor]] = []
    own = scalers(3)
    x, y = batch()

    async def main(world: r.World) -> list[r.StepResult]:
        async with r.Runtime(
            stages[world.rank],
            world=world,
            config=r.Config(microbatches=2),
            loss_fn=nn.functional.mse_loss,
            optimizer=sgd,
            grad_scaler=own[world.rank],
        ) as runtime:
            results = [await runtime.train_step(x, target=y)]
            held = copy.deepcopy(list(stages[world.rank].parameters()))
            results.append(await runtime.train_step(x, target=y))
            assert all(map(torch.equal, held, stages[world.rank].parameters()))
            results.append(await runtime.train_step(x, target=y))
            assert not all(map(torch.equal, held, stages[world.rank].parameters()))
            before.append([])
            return results

    results = await r.run_local(3, main)
    for of_rank in results:
        assert [result.skipped for result in of_rank] == [False, True, False]
    assert {scaler.get_scale() for scaler in own} == {2.0**9}
    assert len(before) == 3


async def test_ranks_that_clip_differently_are_told() -> None:
    """At the end of the first step, before anything was updated."""
    stages = model()
    x, y = batch()

    async def main(world: r.World) -> None:
        async with r.Runtime(
            stages[world.rank],
            world=world,
            config=r.Config(microbatches=2),
            loss_fn=nn.functional.mse_loss,
            max_grad_norm=1.0 if world.rank else None,
        ) as runtime:
            await runtime.train_step(x, target=y)

    with pytest.raises(r.RrfpError, match="max_grad_norm"):
        await r.run_local(3, main)


async def test_several_steps_are_clipped_once() -> None:
    """With update=False nothing is unscaled or clipped; the update sees all of it."""
    ours, theirs = model(), model()
    x, y = batch()

    async def main(world: r.World) -> r.StepResult:
        async with r.Runtime(
            ours[world.rank],
            world=world,
            config=r.Config(microbatches=2),
            loss_fn=nn.functional.mse_loss,
            optimizer=sgd,
            max_grad_norm=MOST,
        ) as runtime:
            first = await runtime.train_step(x, target=y, update=False)
            assert first.grad_norm is None
            await runtime.eval_step(x, target=y)
            return await runtime.train_step(x, target=y)

    results = await r.run_local(3, main)
    whole = nn.Sequential(*theirs)
    for _ in range(2):
        for part, target in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
            (nn.functional.mse_loss(whole(part), target) * 0.5).backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), MOST)
    sgd(list(whole.parameters())).step()
    assert results[0].grad_norm == float(norm)
    assert_same(ours, theirs)


def _model_under(context: Any) -> list[nn.Module]:
    class Under(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            with context():
                out: Tensor = self.inner(x)
                return out

    return [Under(stage) for stage in model(scale=1.0)]


@pytest.mark.parametrize("hint", ["bf", "bfw"])
async def test_autocast_around_a_step_is_autocast_in_every_forward(hint: str) -> None:
    """One rank, in bf16: bitwise as if each stage's forward and the loss were in its own."""
    around, within = model(scale=1.0), _model_under(lambda: torch.autocast("cpu", torch.bfloat16))
    topology = r.Topology(1, chunks=3)
    with torch.autocast("cpu", torch.bfloat16):
        first = await train(around, topology, hint=hint)
    second = await train(within, topology, hint=hint)
    assert [a.loss for a in first[0]] == [b.loss for b in second[0]]
    for one, two in zip(around, within, strict=True):
        for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    plain = await train(model(scale=1.0), topology, hint=hint)
    assert plain[0][0].loss != first[0][0].loss


async def test_autocast_around_the_steps_of_several_ranks_of_a_process_is_refused() -> None:
    """It would be set for whichever rank's code runs next on the loop."""
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(r.StateError, match="inside the stages' forward"),
    ):
        await train(model(), r.Topology(3))


@pytest.mark.parametrize("hint", ["bf", "bfw"])
async def test_float16_trains_under_autocast_with_a_scaler(hint: str) -> None:
    """The whole recipe: fp16 forwards, scaled losses, clipping; equal to one unpartitioned rank."""

    def fp16() -> Any:
        return torch.autocast("cpu", torch.float16)

    ours, theirs = _model_under(fp16), _model_under(fp16)
    own, [their] = scalers(3), scalers(1)
    await train(ours, r.Topology(3), scalers=own, hint=hint)
    reference(theirs, their)
    for one, two in zip(ours, theirs, strict=True):
        for mine, yours in zip(one.parameters(), two.parameters(), strict=True):
            assert torch.equal(mine, yours)
    assert {scaler.get_scale() for scaler in own} == {their.get_scale()}


async def test_a_learning_rate_scheduler_follows_the_updates() -> None:
    """`runtime.optimizer` is what torch's schedulers take; bitwise the unpartitioned loop."""
    ours, theirs = model(), model()
    x, y = batch()

    async def main(world: r.World) -> list[float]:
        async with r.Runtime(
            ours[world.rank],
            world=world,
            config=r.Config(microbatches=2),
            loss_fn=nn.functional.mse_loss,
            optimizer=sgd,
            max_grad_norm=MOST,
        ) as runtime:
            assert runtime.optimizer is not None
            scheduler = torch.optim.lr_scheduler.StepLR(runtime.optimizer, step_size=2, gamma=0.1)
            rates = []
            for _ in range(STEPS):
                await runtime.train_step(x, target=y, update=False)
                await runtime.eval_step(x, target=y)
                await runtime.train_step(x, target=y)
                scheduler.step()
                rates += scheduler.get_last_lr()
            return rates

    rates = await r.run_local(3, main)
    whole = nn.Sequential(*theirs)
    optimizer = sgd(list(whole.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            for part, target in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
                (nn.functional.mse_loss(whole(part), target) * 0.5).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), MOST)
        optimizer.step()
        scheduler.step()
        assert rates[0][step] == scheduler.get_last_lr()[0]
    assert_same(ours, theirs)


async def test_a_checkpoint_keeps_the_loss_scale(tmp_path: Path) -> None:
    """Scale and growth tracker go on where they were, on every rank."""
    x, y = batch()

    async def train_and(
        stages: list[nn.Module], own: list[torch.amp.GradScaler], steps: int, *, load: bool
    ) -> None:
        async def main(world: r.World) -> None:
            async with r.Runtime(
                stages[world.rank],
                world=world,
                config=r.Config(microbatches=2),
                loss_fn=nn.functional.mse_loss,
                optimizer=sgd,
                grad_scaler=own[world.rank],
                names=lambda stage, name: f"{stage}.{name}",
            ) as runtime:
                if load:
                    await runtime.load(tmp_path / "saved")
                for _ in range(steps):
                    await runtime.train_step(x, target=y)
                if not load:
                    await runtime.save(tmp_path / "saved")

        await r.run_local(3, main)

    first, second = model(scale=1.0), model(scale=1.0)
    before, after = scalers(3), scalers(3, init_scale=2.0)
    await train_and(first, before, 3, load=False)  # grown once, and once on the way
    await train_and(second, after, 0, load=True)
    for one, two in zip(before, after, strict=True):
        assert one.state_dict() == two.state_dict()
    assert before[0].get_scale() == 2.0**11

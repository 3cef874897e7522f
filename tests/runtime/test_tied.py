"""Hazard 14: parameters that several stages hold a copy of, on other ranks or on the same."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rrfp_async as r
from tests.runtime.parity import order_of, shaken

WORDS, WIDTH = 11, 8


class Head(nn.Module):
    """Logits from the embedding's weight, after a layer of its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=weight.dtype)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.layer(x), self.weight)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def model(stages: int, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """An embedding, layers, and a head with the embedding's weight."""
    torch.manual_seed(3)
    first = nn.Embedding(WORDS, WIDTH, dtype=dtype)
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Tanh())] * (stages - 2)
    return [first, *map(copy.deepcopy, middle), Head(first.weight)]


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    draw = [torch.randint(0, WORDS, (2, 8, 5), generator=generator) for _ in range(count)]
    return [(x, y) for x, y in draw]


def reference(stages: list[nn.Module], steps: int, lr: float = 0.5) -> tuple[list[float], Tensor]:
    """Losses of unpartitioned SGD, and the tied weight after it."""
    whole = nn.Sequential(*stages)
    optimizer = torch.optim.SGD(whole.parameters(), lr=lr)
    losses = []
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss = cross_entropy(whole(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, stages[0].weight.detach()


async def train(
    stages: list[nn.Module],
    topology: r.Topology,
    folder: Path,
    *,
    steps: int = 3,
    seed: int = 0,
    accumulate: bool = False,
    **options: Any,
) -> list[list[float]]:
    """Losses by rank of SGD over the pipeline, with or without one update for two steps."""

    async def main(world: r.World) -> list[float]:
        config = r.Config(microbatches=4, trace_dir=folder, **options)
        own = [stages[stage] for stage in topology.stages_of(world.rank)]
        async with r.Runtime(
            own,
            world=shaken(seed)(world),
            config=config,
            loss_fn=cross_entropy,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        ) as runtime:
            results = []
            for number, (x, y) in enumerate(batches(steps)):
                update = not accumulate or number % 2 == 1
                results.append(await runtime.train_step(x, target=y, update=update))
            return [result.loss for result in results]

    return await r.run_local(topology.world_size, main, topology=topology)


def separate(stages: list[nn.Module]) -> list[nn.Module]:
    """Each stage with its own copy of everything, as ranks have."""
    return [copy.deepcopy(stage) for stage in stages]


@pytest.mark.parametrize("hint", ["bf", "bfw", "auto"])
@pytest.mark.parametrize("ranks", [2, 3])
async def test_copies_stay_equal_and_train_as_one(ranks: int, hint: str, tmp_path: Path) -> None:
    """Bitwise equal to each other after three steps; the model's within 1e-9 of the whole one's."""
    stages = separate(model(ranks))
    tied = [{0: "weight", ranks - 1: "weight"}]
    losses = await train(stages, r.Topology(ranks, tied=tied), tmp_path, hint=hint)
    wanted, weight = reference(model(ranks), 3)
    assert torch.equal(stages[0].weight, stages[-1].weight)
    assert torch.equal(stages[0].weight.grad, stages[-1].weight.grad)
    assert (stages[0].weight - weight).abs().max() < 1e-9
    for of_rank in losses:
        assert of_rank == pytest.approx(wanted, abs=1e-9)
    assert "0R0" in order_of(tmp_path, 0)


async def test_any_order_gives_the_same_bits(tmp_path: Path) -> None:
    """Sums are taken in one order, whatever the dispatch order was."""
    seen = []
    for seed in range(5):
        stages = separate(model(3, torch.float32))
        topology = r.Topology(3, tied=[{0: "weight", 2: "weight"}])
        await train(stages, topology, tmp_path / str(seed), hint="bfw", seed=seed)
        seen.append(stages[0].weight.detach().clone())
    for weight in seen[1:]:
        assert torch.equal(weight, seen[0])


@pytest.mark.parametrize("shared", [True, False], ids=["one parameter", "two copies"])
@pytest.mark.parametrize("hint", ["bf", "bfw"])
async def test_owners_on_one_rank_may_share_the_parameter(
    shared: bool, hint: str, tmp_path: Path
) -> None:
    """In a V the first and the last stage are on one rank: as one Parameter, or as two equal."""
    stages = model(4) if shared else separate(model(4))
    tied = [{0: "weight", 3: "weight"}]
    topology = r.Topology(2, chunks=2, placement="v", tied=tied)
    before = [dict(stage.named_parameters()) for stage in stages]
    losses = await train(stages, topology, tmp_path, hint=hint)
    wanted, weight = reference(model(4), 3)
    assert losses[0] == pytest.approx(wanted, abs=1e-9)
    assert (stages[0].weight - weight).abs().max() < 1e-9
    assert torch.equal(stages[0].weight, stages[-1].weight)
    assert (stages[0].weight is stages[-1].weight) is shared
    for stage, parameters in zip(stages, before, strict=True):
        assert dict(stage.named_parameters()) == parameters


async def test_three_owners_on_two_ranks_are_summed_once(tmp_path: Path) -> None:
    """Two stages of a rank share the parameter, a third elsewhere has a copy."""
    torch.manual_seed(1)
    layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    own = [copy.deepcopy(layer) for _ in range(4)]
    whole = nn.Sequential(layer, own[1], layer, layer)
    stages = [copy.deepcopy(layer), own[1], copy.deepcopy(layer), copy.deepcopy(layer)]
    stages[2].weight = stages[0].weight
    topology = r.Topology(
        2, chunks=2, placement="loop", tied=[{0: "weight", 2: "weight", 3: "weight"}]
    )
    x, y = torch.randn(2, 8, WIDTH, dtype=torch.float64).unbind()

    async def main(world: r.World) -> None:
        held = [stages[stage] for stage in topology.stages_of(world.rank)]
        async with r.Runtime(
            held,
            world=world,
            config=r.Config(microbatches=4, trace_dir=tmp_path),
            loss_fn=nn.functional.mse_loss,
        ) as runtime:
            await runtime.train_step(x, target=y)

    await r.run_local(2, main, topology=topology)
    nn.functional.mse_loss(whole(x), y).backward()
    for stage in (0, 2, 3):
        assert (stages[stage].weight.grad - layer.weight.grad).abs().max() < 1e-12
    assert torch.equal(stages[0].weight.grad, stages[3].weight.grad)


async def test_gradients_are_summed_once_for_several_steps(tmp_path: Path) -> None:
    """With update=False a step's gradients wait; what is summed at the update is all of them."""
    stages = separate(model(2))
    topology = r.Topology(2, tied=[{0: "weight", 1: "weight"}])
    await train(stages, topology, tmp_path, steps=2, accumulate=True)
    whole = model(2)
    for x, y in batches(2):
        cross_entropy(nn.Sequential(*whole)(x), y).backward()
    assert (stages[0].weight.grad - whole[0].weight.grad).abs().max() < 1e-9
    assert torch.equal(stages[0].weight, stages[-1].weight)


async def test_copies_that_differ_at_the_start_are_an_error(tmp_path: Path) -> None:
    """It names both stages, on every rank, before anything was updated."""
    stages = separate(model(3))
    with torch.no_grad():
        stages[2].weight[0, 0] += 1
    topology = r.Topology(3, tied=[{0: "weight", 2: "weight"}])
    with pytest.raises(r.StepFailed, match="tied parameter 0:weight = 2:weight differ on stages 0"):
        await train(stages, topology, tmp_path)


@pytest.mark.parametrize("frozen", [0, 2])
async def test_a_frozen_copy_of_a_trained_parameter_is_an_error(
    frozen: int, tmp_path: Path
) -> None:
    """It would be trained by the others' gradients, or fall behind them."""
    stages = separate(model(3))
    stages[frozen].weight.requires_grad_(False)
    topology = r.Topology(3, tied=[{0: "weight", 2: "weight"}])
    with pytest.raises(r.StepFailed, match=f"'weight' of stage {frozen} is frozen"):
        await train(stages, topology, tmp_path)


@pytest.mark.parametrize(
    ("tied", "told"),
    [
        ([{0: "weight"}], "at least two"),
        ([{0: "weight", 5: "weight"}], "of the stages 0..1"),
        ([{0: "weight", 1: 3}], "parameter's name"),
        ([{0: "a", 1: "b"}, {0: "a", 1: "c"}], "'a' of stage 0 twice"),
        ("weight", "tied='weight'"),
    ],
)
def test_what_is_no_tie_is_refused(tied: Any, told: str) -> None:
    """Before anything starts."""
    with pytest.raises(ValueError, match=told):
        r.Topology(2, tied=tied)


async def test_a_name_that_the_stage_does_not_have_is_refused() -> None:
    """The message tells where names come from."""
    topology = r.Topology(2, tied=[{0: "weight", 1: "wait"}])
    async with r.local_world(2, topology) as worlds:
        with pytest.raises(ValueError, match="'wait' is none of stage 1"):
            r.Runtime(model(2)[1], world=worlds[1], config=r.Config(microbatches=1))


async def test_sharing_without_a_tie_is_refused() -> None:
    """The message is the setting to give."""
    topology = r.Topology(2, chunks=2, placement="v")
    stages = model(4)
    async with r.local_world(2, topology) as worlds:
        with pytest.raises(ValueError, match=r"Topology\(tied=\[\{0: 'weight', 3: 'weight'\}\]\)"):
            r.Runtime([stages[0], stages[3]], world=worlds[0], config=r.Config(microbatches=1))

"""Cutting a sequence of layers into stages: the best cut, the names kept, what is refused."""

import itertools
import random
from collections import OrderedDict
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

import rrfp_async as r
from rrfp_async.partition import split_sequential

SEEDS = range(40)


def layers(count: int) -> list[nn.Module]:
    """So many linear layers."""
    return [nn.Linear(4, 4) for _ in range(count)]


def counts(stages: list[nn.Sequential]) -> list[int]:
    """How many layers each stage holds."""
    return list(map(len, stages))


def cut(weights: list[float], num_stages: int) -> list[int]:
    """How many layers each stage gets for these weights."""
    return counts(split_sequential([nn.Identity() for _ in weights], num_stages, weights=weights))


def best_cut(weights: list[float], num_stages: int) -> list[int]:
    """What the docstring promises, by trying every cut."""
    exact = [Fraction(weight) for weight in weights]

    def costs(cuts: tuple[int, ...]) -> tuple[Any, ...]:
        ends = [0, *cuts, len(weights)]
        parts = [exact[a:b] for a, b in itertools.pairwise(ends)]
        sums = list(map(sum, parts))
        return max(sums), sum(s * s for s in sums), sum(len(p) ** 2 for p in parts), cuts

    cuts = min(itertools.combinations(range(1, len(weights)), num_stages - 1), key=costs)
    return [b - a for a, b in itertools.pairwise([0, *cuts, len(weights)])]


def drawn_weights(seed: int) -> list[float]:
    """A few weights of one sort: small, with zeros, as floats, or past a float's exactness."""
    draw = random.Random(seed)
    sorts = (
        lambda: draw.randint(1, 9),
        lambda: draw.choice((0, 0, 1, 3)),
        draw.random,
        lambda: draw.choice((2.0**53, 1.0, 0.5, 3.0)),
    )
    sort = sorts[seed % len(sorts)]
    return [sort() for _ in range(draw.randint(1, 9))]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cut_is_the_best_of_all_cuts(seed: int) -> None:
    """Heaviest stage, then squares of weights, then of counts, then the earliest, for any count."""
    weights = drawn_weights(seed)
    for num_stages in range(1, len(weights) + 1):
        assert cut(weights, num_stages) == best_cut(weights, num_stages), (weights, num_stages)


def test_below_the_heaviest_stage_the_rest_is_even() -> None:
    """One layer of 8 sets the maximum; the other four ones are not left in a heap."""
    assert cut([1, 1, 1, 1, 8], 3) == [2, 2, 1]


def test_layers_without_weight_are_spread_by_number() -> None:
    """Six that weigh nothing make two, two and two; so do six without parameters by default."""
    assert cut([0] * 6, 3) == [2, 2, 2]
    assert counts(split_sequential([nn.ReLU() for _ in range(6)], 3)) == [2, 2, 2]


def test_hundreds_of_layers_are_cut_exactly() -> None:
    """1 .. 400 into 32 stages: no stage above what a greedy fill with one less could not hold."""
    weights = list(range(1, 401))
    sizes = cut(weights, 32)
    ends = [0, *itertools.accumulate(sizes)]
    most = max(sum(weights[a:b]) for a, b in itertools.pairwise(ends))
    filled = [0]
    for weight in weights:
        if filled[-1] + weight > most - 1:
            filled.append(0)
        filled[-1] += weight
    assert len(filled) > 32


def test_the_default_weight_is_the_number_of_elements() -> None:
    """A wide layer outweighs four others, a ReLU weighs nothing; or as a function tells."""
    model = [nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4), *layers(3)]
    assert counts(split_sequential(model, 2)) == [2, 4]
    assert counts(split_sequential(model, 2, weights=lambda layer: layer is model[-1])) == [3, 3]
    assert counts(split_sequential(model, 2, weights=lambda layer: layer in model[-2:])) == [5, 1]


def test_a_stage_keeps_the_names_of_the_unpartitioned_model() -> None:
    """State dicts of the stages put together are the model's, key by key, tensor by tensor."""
    model = nn.Sequential(*layers(5))
    stages = split_sequential(model, 3)
    assert list(stages[0].state_dict()) == ["0.weight", "0.bias"]
    joined = {name: t for stage in stages for name, t in stage.state_dict(keep_vars=True).items()}
    wanted = model.state_dict(keep_vars=True)
    assert list(joined) == list(wanted)
    assert all(joined[name] is wanted[name] for name in wanted)


@pytest.mark.parametrize("kind", ["named", "ModuleList", "tuple"])
def test_names_are_those_of_the_container(kind: str) -> None:
    """A named Sequential's own, else the places."""
    parts = layers(3)
    named = OrderedDict(zip(("embedding", "block", "head"), parts, strict=True))
    given = {
        "named": nn.Sequential(named),
        "ModuleList": nn.ModuleList(parts),
        "tuple": tuple(parts),
    }
    stages = split_sequential(given[kind], 2, weights=[1, 1, 2])
    names = ["embedding", "block", "head"] if kind == "named" else ["0", "1", "2"]
    assert [[name for name, _ in stage.named_children()] for stage in stages] == [
        names[:2],
        names[2:],
    ]
    assert [layer for stage in stages for layer in stage] == parts


def test_one_relu_may_stand_in_several_places() -> None:
    """A module that holds nothing is placed wherever it was listed, also twice in a stage."""
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu, relu)
    stages = split_sequential(model, 2, weights=[1] * 5)
    assert [layer for stage in stages for layer in stage] == list(model)
    batch = torch.randn(3, 4)
    assert torch.equal(stages[1](stages[0](batch)), model(batch))


def test_weights_tied_within_a_stage_are_no_fault() -> None:
    """Two layers over one parameter, if the cut keeps them together."""
    first, second, last = layers(3)
    second.weight = first.weight
    assert counts(split_sequential([first, second, last], 2, weights=[1, 1, 2])) == [2, 1]


def same_twice(layer: nn.Module) -> list[nn.Module]:
    """A list with `layer` at 0 and 2."""
    return [layer, nn.ReLU(), layer]


def tied() -> list[nn.Module]:
    """Layers 0 and 2 with one weight."""
    made = layers(3)
    made[2].weight = made[0].weight
    return made


class Residual(nn.Sequential):
    """Not only a sequence."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + super().forward(batch)


@pytest.mark.parametrize(
    ("given", "num_stages", "weights", "message"),
    [
        (layers(3), 0, None, "num_stages=0 must be an int from 1 to 3"),
        (layers(3), 4, None, "num_stages=4 must be an int from 1 to 3, the number of layers"),
        (layers(3), True, None, "num_stages=True must be an int"),
        ([], 1, None, "num_stages=1 must be an int from 1 to 0"),
        (layers(3), 2, [1, 2], "2 weights for 3 layers: give one for each"),
        (layers(3), 2, [1, -2, 1], "weight of layer '1' is -2: it must be a finite number"),
        (layers(3), 2, [1, 1, float("nan")], "weight of layer '2' is nan"),
        (layers(3), 2, [float("inf"), 1, 1], "weight of layer '0' is inf"),
        (layers(3), 2, lambda layer: None, "weight of layer '0' is None"),
        ([nn.ReLU(), torch.relu], 1, None, "layer '1' is of type builtin_function_or_method"),
        (nn.Linear(4, 4), 1, None, "layers of type Linear have no order"),
        (Residual(*layers(2)), 2, None, "type Residual have a forward of their own"),
        (same_twice(nn.Linear(4, 4)), 1, None, "layers '0' and '2' are the same Linear"),
        (same_twice(nn.BatchNorm1d(4, affine=False)), 1, None, "are the same BatchNorm1d"),
        (tied(), 3, None, "'0.weight' in stage 0 and '2.weight' in stage 2 are the same parameter"),
        ([nn.LazyLinear(4), nn.ReLU()], 2, None, "layer '0' has parameters whose shape"),
    ],
)
def test_what_does_not_fit_is_refused(
    given: Any, num_stages: Any, weights: Any, message: str
) -> None:
    """A ValueError with the value, the rule and the remedy."""
    with pytest.raises(ValueError, match=message):
        split_sequential(given, num_stages, weights=weights)


def sequence() -> nn.Sequential:
    """Eight layers, the same ones at each call."""
    torch.manual_seed(5)
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(8, 8), nn.Tanh())))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Moves the parameters far enough to be seen in the next step."""
    return torch.optim.SGD(parameters, lr=0.1)


def plain_training(
    model: nn.Module, batch: torch.Tensor, target: torch.Tensor
) -> tuple[list[float], dict[str, Any]]:
    """Two steps on four microbatches in plain torch: losses, and the last gradients."""
    optimizer, losses = sgd(list(model.parameters())), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = 0.0
        for part, goal in zip(batch.chunk(4), target.chunk(4), strict=True):
            each = nn.functional.mse_loss(model(part), goal)
            (each * 0.25).backward()
            loss += each.item() * 0.25
        losses.append(loss)
        optimizer.step()
    return losses, {name: p.grad for name, p in model.named_parameters()}


async def test_stages_train_to_the_bits_of_the_unpartitioned_model() -> None:
    """Three ranks, two steps with an optimizer: losses, and gradients by the model's names."""
    torch.manual_seed(6)
    batch, target = torch.randn(8, 8), torch.randn(8, 8)

    async def main(world: r.World) -> tuple[list[float], dict[str, Any]]:
        stage = split_sequential(sequence(), world.topology.num_stages)[world.rank]
        config, loss_fn = r.Config(microbatches=4), nn.functional.mse_loss
        runtime = r.Runtime(stage, world=world, config=config, loss_fn=loss_fn, optimizer=sgd)
        async with runtime:
            losses = [(await runtime.train_step(batch, target=target)).loss for _ in range(2)]
        return losses, {name: p.grad for name, p in stage.named_parameters()}

    ranks = await r.run_local(3, main)
    losses, gradients = plain_training(sequence(), batch, target)
    assert [held[0] for held in ranks] == [losses] * 3
    joined = {name: grad for _, held in ranks for name, grad in held.items()}
    assert joined.keys() == gradients.keys()
    assert all(torch.equal(joined[name], gradients[name]) for name in gradients)

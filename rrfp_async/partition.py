"""A sequence of layers, cut into contiguous stages of which the heaviest is as light as can be.

Knows modules and numbers. It refuses to know ranks, and what a layer really costs: that is told.
"""

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, chain, pairwise

from torch import nn
from torch.nn.parameter import is_lazy

Weights = Sequence[float] | Callable[[nn.Module], float]
"""What each layer costs, in any unit."""

Named = list[tuple[str, nn.Module]]


def split_sequential(
    layers: nn.Sequential | nn.ModuleList | Sequence[nn.Module],
    num_stages: int,
    *,
    weights: Weights | None = None,
) -> list[nn.Sequential]:
    """Cut `layers` into `num_stages` stages, each a run of at least one layer, in order.

    Of all cuts it takes one whose heaviest stage is lightest; of those, the one with the most even
    weights (the least sum of squares), then with the most even numbers of layers, then the one
    that cuts earliest. Sums are exact, so every rank finds the same cut.

    The stages hold the layers themselves, no copies, under the names that they have in the
    unpartitioned model, `layers` or `nn.Sequential(*layers)`: so do parameters in a `state_dict`.

    Args:
        layers: The model, each layer called with what the one before it returned.
        num_stages: The number of stages, from 1 to the number of layers.
        weights: A number for each layer, or a function that tells one for a module: milliseconds,
            operations, bytes. By default the number of the parameters' elements.

    Raises:
        ValueError: If an argument does not fit, a module with parameters or buffers stands in two
            places, or a parameter would come to be in two stages.
    """
    named = _named(layers)
    if type(num_stages) is not int or not 1 <= num_stages <= len(named):
        raise ValueError(
            f"num_stages={num_stages!r} must be an int from 1 to {len(named)}, the number of "
            f"layers: every stage holds at least one"
        )
    _check_distinct(named)
    cuts = _cuts(_whole(_weights_of(named, weights)), num_stages)
    stages = [nn.Sequential(OrderedDict(named[start:end])) for start, end in pairwise(cuts)]
    assert [pair for stage in stages for pair in stage._modules.items()] == named
    _check_untied(stages)
    return stages


def _named(layers: nn.Sequential | nn.ModuleList | Sequence[nn.Module]) -> Named:
    """Every layer under its name, one that stands in several places under each of them."""
    if isinstance(layers, nn.Module) and not isinstance(layers, nn.Sequential | nn.ModuleList):
        raise ValueError(
            f"layers of type {type(layers).__name__} have no order in which they are called: give "
            f"an nn.Sequential, an nn.ModuleList or a list of modules"
        )
    if isinstance(layers, nn.Sequential) and type(layers).forward is not nn.Sequential.forward:
        raise ValueError(
            f"layers of type {type(layers).__name__} have a forward of their own, which no stage "
            f"would call: give list(layers) if it only calls them in order"
        )
    children: Iterable[tuple[str, object]]
    if isinstance(layers, nn.Sequential | nn.ModuleList):
        children = layers._modules.items()  # named_children() tells a module once
    else:
        children = ((str(place), layer) for place, layer in enumerate(layers))
    named: Named = []
    for name, layer in children:
        if not isinstance(layer, nn.Module):
            raise ValueError(
                f"layer {name!r} is of type {type(layer).__name__}: every layer must be an "
                f"nn.Module, wrap a function in one"
            )
        named.append((name, layer))
    return named


def _check_distinct(named: Named) -> None:
    """Refuse one module in two places, unless it holds nothing that they could share."""
    places: dict[int, str] = {}
    for name, layer in named:
        first = places.setdefault(id(layer), name)
        if first != name and any(True for _ in chain(layer.parameters(), layer.buffers())):
            raise ValueError(
                f"layers {first!r} and {name!r} are the same {type(layer).__name__} with "
                f"parameters or buffers of its own, which two stages cannot share: give each "
                f"place a module of its own"
            )


def _check_untied(stages: list[nn.Sequential]) -> None:
    """Refuse a parameter in two stages: each would train a copy of its own."""
    owners: dict[int, tuple[int, str]] = {}
    for stage, module in enumerate(stages):
        for name, parameter in module.named_parameters():
            owner, first = owners.setdefault(id(parameter), (stage, name))
            if owner != stage:
                raise ValueError(
                    f"{first!r} in stage {owner} and {name!r} in stage {stage} are the same "
                    f"parameter, and weights tied between stages are not supported: untie them, "
                    f"or choose weights that keep both layers in one stage"
                )


def _weights_of(named: Named, weights: Weights | None) -> list[float]:
    """One checked number for each layer."""
    if weights is None:
        return [_elements(name, layer) for name, layer in named]
    numbers = [weights(layer) for _, layer in named] if callable(weights) else list(weights)
    if len(numbers) != len(named):
        raise ValueError(f"{len(numbers)} weights for {len(named)} layers: give one for each layer")
    for (name, _), number in zip(named, numbers, strict=True):
        known = isinstance(number, int | float)
        if not known or not math.isfinite(number) or number < 0:
            raise ValueError(
                f"the weight of layer {name!r} is {number!r}: it must be a finite number of at "
                f"least 0"
            )
    return numbers


def _elements(name: str, layer: nn.Module) -> int:
    """How many numbers the layer's parameters hold."""
    if any(map(is_lazy, layer.parameters())):
        raise ValueError(
            f"layer {name!r} has parameters whose shape is not known yet: call the model once, or "
            f"give weights"
        )
    return sum(parameter.numel() for parameter in layer.parameters())


def _whole(weights: Sequence[float]) -> list[int]:
    """The weights in a unit in which each is a whole number, so that no sum is rounded."""
    exact = [Fraction(weight) for weight in weights]
    unit = math.lcm(*(number.denominator for number in exact))
    return [int(number * unit) for number in exact]


def _cuts(weights: Sequence[int], num_stages: int) -> list[int]:
    """Where each stage begins, and the end."""
    sums = [0, *accumulate(weights)]
    most = _least_most(sums, max(weights), num_stages)
    return [0, *_most_even_ends(sums, num_stages, most)]


def _least_most(sums: Sequence[int], heaviest: int, num_stages: int) -> int:
    """The weight that no stage need exceed, by bisection; `sums` are those of the first layers."""
    low, high = heaviest, sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(sums, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_needed(sums: Sequence[int], most: int) -> int:
    """How many stages it takes if each is filled as long as it weighs no more than `most`."""
    end = needed = 0
    while end < len(sums) - 1:
        end = bisect_right(sums, sums[end] + most) - 1
        needed += 1
    return needed


def _most_even_ends(sums: Sequence[int], num_stages: int, most: int) -> tuple[int, ...]:
    """Where each stage ends, none heavier than `most`; by dynamic programming from the back.

    A plan for the layers from `start` on is compared by its sum of squared weights, then of squared
    layer counts, then by its ends.
    """
    layers = len(sums) - 1
    plans: dict[int, tuple[int, int, tuple[int, ...]]] = {layers: (0, 0, ())}
    for later in range(num_stages):
        earlier = num_stages - 1 - later
        starts = range(earlier, layers - later) if earlier else range(1)
        longer = {}
        for start in starts:
            beyond = bisect_right(sums, sums[start] + most)
            choices = (
                (
                    (sums[end] - sums[start]) ** 2 + plans[end][0],
                    (end - start) ** 2 + plans[end][1],
                    (end, *plans[end][2]),
                )
                for end in range(start + 1, beyond)
                if end in plans
            )
            if (best := min(choices, default=None)) is not None:
                longer[start] = best
        plans = longer
    return plans[0][2]

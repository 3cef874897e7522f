"""Stages of one model on simulated ranks, each with its end of the step; and gradients by hand."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple
from itertools import cycle, islice
from typing import Any

import msgpack
import pytest
import torch
from torch import nn

from rrfp_async.tasks.update import GradientReport, Update, Verdict, verdict

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
STAGES = 4
WIDTH = 24
PLACES = {
    "1 rank": (0, 0, 0, 0),
    "2 ranks": (0, 0, 1, 1),
    "2 ranks, looped": (0, 1, 0, 1),
    "2 ranks, V": (0, 1, 1, 0),
    "3 ranks": (0, 1, 2, 2),
    "4 ranks": (0, 1, 2, 3),
    "4 ranks, backwards": (3, 2, 1, 0),
}
MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

every_place = pytest.mark.parametrize("owners", PLACES.values(), ids=PLACES)


def sgd(held: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(held, lr=1e-3, momentum=0.9)


class Block(nn.Module):
    """Layers of `dtype`, a norm of another, and parameters that get no gradient."""

    def __init__(self, dtype: torch.dtype, of_norm: torch.dtype) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(WIDTH, dtype=dtype), requires_grad=False)
        self.first = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.unused = nn.Parameter(torch.ones(WIDTH, dtype=dtype))
        self.norm = nn.LayerNorm(WIDTH, dtype=of_norm)
        self.second = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x.to(self.frozen.dtype)) * self.frozen)
        return torch.as_tensor(self.second(self.norm(y.to(self.norm.weight.dtype)).to(y.dtype)))


def model_of(*dtypes: torch.dtype, of_norms: torch.dtype | None = None) -> nn.Sequential:
    """The unpartitioned model: a block for each stage, of `dtypes` in turn."""
    torch.manual_seed(1)
    in_turn = islice(cycle(dtypes), STAGES)
    return nn.Sequential(*(Block(dtype, of_norms or dtype) for dtype in in_turn))


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def backward(model: nn.Module, step: int, scale: torch.Tensor | None) -> None:
    """Fresh gradients, of a loss that is multiplied by `scale`."""
    model.zero_grad()
    loss = model(batch(step)).float().square().sum()
    (loss if scale is None else loss * scale).backward()


class Ranks:
    """The stages of `model` on the ranks that own them, each with an end of the step."""

    def __init__(
        self,
        model: nn.Sequential,
        owners: Sequence[int],
        make: MakeOptimizer | None = None,
        *,
        max_grad_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.model = model
        self.scalers = [copy.deepcopy(scaler) for _ in range(max(owners) + 1)]
        self.optimizers: list[torch.optim.Optimizer | None] = []
        self.updates: list[Update] = []
        for rank, own_scaler in enumerate(self.scalers):
            stages = {
                stage: list(model[stage].parameters())
                for stage, owner in reversed(list(enumerate(owners)))
                if owner == rank
            }
            held = [each for stage in sorted(stages) for each in stages[stage]]
            optimizer = None if make is None else make(held)
            self.optimizers.append(optimizer)
            self.updates.append(
                Update(optimizer, stages, max_grad_norm=max_grad_norm, grad_scaler=own_scaler)
            )

    def backward(self, step: int) -> None:
        backward(self.model, step, self.updates[-1].loss_scale())

    def end(self) -> Verdict:
        return end(self.updates)

    def scales(self) -> list[dict[str, Any]]:
        return [scaler.state_dict() for scaler in self.scalers if scaler is not None]


def end(updates: Sequence[Update]) -> Verdict:
    """End a step on all ranks; what they say travels as msgpack."""
    reports = {rank: GradientReport(*sent(each.report())) for rank, each in enumerate(updates)}
    result = verdict(dict(reversed(reports.items())))
    for each in updates:
        each.apply(Verdict(*sent(result)))
    return result


def sent(value: GradientReport | Verdict) -> list[Any]:
    received: list[Any] = msgpack.unpackb(msgpack.packb(astuple(value)))
    return received


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    """Every parameter and gradient has the same bits; NaN equals NaN."""
    exact = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
    pairs = zip(actual.named_parameters(), expected.named_parameters(), strict=True)
    for (name, of_actual), (_, of_expected) in pairs:
        torch.testing.assert_close(of_actual, of_expected, **exact, msg=name)
        assert (of_actual.grad is None) == (of_expected.grad is None), name
        if of_expected.grad is not None:
            torch.testing.assert_close(of_actual.grad, of_expected.grad, **exact, msg=name)


def plant(model: nn.Sequential, stage: int, value: float = math.inf) -> None:
    """One bad number among the gradients of one stage."""
    gradient = model[stage].first.weight.grad
    assert gradient is not None
    gradient[2, 3] = value


def scaler_of(scale: float = 8.0, **options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", scale, growth_interval=2, **options)


def parameter(gradient: float | None, dtype: torch.dtype = F32) -> nn.Parameter:
    """A parameter of three numbers, with a gradient of three equal ones or none."""
    made = nn.Parameter(torch.zeros(3, dtype=dtype))
    if gradient is not None:
        made.grad = torch.full((3,), gradient, dtype=dtype)
    return made

"""HAZARDS.md 13: stages whose backward cannot be split, amid others whose backward is."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.runtime.parity import assert_parity, linear_stages
from tests.runtime.reference import Case
from tests.runtime.test_split_hazards import (
    BFW,
    ZB_H1,
    assert_split_parity,
    microbatches_of,
    sgd,
    steps,
)


@pytest.fixture(params=[BFW, ZB_H1], ids=["bfw", "zb-h1 binding"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The hint, and whether it is law."""
    return request.param


class Compiled(nn.Module):
    """A compiled layer; copies are compiled too."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(8, 8)
        self.compiled = torch.compile(self.plain, backend="aot_eager")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Compiled":
        other = Compiled()
        other.plain.load_state_dict(self.plain.state_dict())
        return other

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.compiled(x))


class Hooked(nn.Module):
    """Doubles the gradient of its weight by a hook; copies do too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.linear.weight.register_hook(lambda gradient: gradient * 2)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hooked":
        other = Hooked()
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def _recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=True)


class HiddenReentrant(nn.Module):
    """Reenters autograd, which only the graph of its first forward tells."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(_recomputed(self.first, x).tanh())


def _ours(told: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in told if w.category is RuntimeWarning and "split" in str(w)]


@pytest.fixture
def _compiles_afresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_compiles_afresh")
@pytest.mark.parametrize("make", [Compiled, Hooked])
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_stage_that_cannot_be_split_runs_whole_amid_others(
    tmp_path: Path, options: dict[str, Any], make: Callable[[], nn.Module], place: int
) -> None:
    """Hazard 13: full B on that stage, I and W on the others, one warning naming it; parity."""
    torch.manual_seed(3)
    stages = linear_stages(3)
    stages[place] = make()
    case = Case(stages, steps(8, 8), microbatches=4, make_optimizer=sgd)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        await assert_split_parity(case, tmp_path, range(1), whole=(place,), options=options)
    [text] = _ours(told)
    assert f"stage {place}" in text


@pytest.mark.parametrize("place", [1, 2])
async def test_a_hidden_reentrant_checkpoint_costs_the_split_after_one_step(
    tmp_path: Path, options: dict[str, Any], place: int
) -> None:
    """I and W in the first step, B from then on, one warning naming the stage; parity."""
    torch.manual_seed(4)
    stages = linear_stages(3)
    stages[place] = HiddenReentrant()
    case = Case(stages, steps(8, 8, 8), microbatches=4, make_optimizer=sgd, options=options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        [run] = await assert_parity(case, tmp_path, seeds=range(1), orders_differ=False)
    [text] = _ours(told)
    assert f"stage {place}" in text
    assert microbatches_of(run, place, "W") == [0, 1, 2, 3]
    assert microbatches_of(run, place, "B") == [0, 1, 2, 3] * 2

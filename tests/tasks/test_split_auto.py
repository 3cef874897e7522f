"""The rule of the automatic hint: which stages are worth a split; nothing is said of it."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rrfp_async.tasks.split_support import split_support
from tests.tasks.split_harness import (
    MIDDLE,
    PLACES,
    PUT_OFF,
    Case,
    made,
    make_stage,
    run_fused,
    run_split,
)
from tests.tasks.split_models import WIDTH, Block, ids, mlp, randn
from tests.tasks.test_split_support import UNABLE, HiddenReentrant, hooked

Make = Callable[[], nn.Module]
OUTSIDE = "outside nn.Linear"


class Owning(nn.Module):
    """A module of the user's, most of whose parameters are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4096))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale.mean()


class OwnLinear(nn.Linear):
    """A user's layer: whether it goes through `nn.Linear`'s forward, only a run tells."""


class OwnEmbedding(nn.Embedding):
    """A user's table, which no name of torch's gives away."""


def embedding(words: int, *, trained: bool = True) -> nn.Module:
    """A table of so many words before a layer of 272 parameters."""
    table = nn.Embedding(words, WIDTH).requires_grad_(trained)
    return nn.Sequential(table, nn.Linear(WIDTH, WIDTH))


def frozen_layers(module: nn.Module) -> nn.Module:
    """The same, of whose layers nothing is trained."""
    for part in module.modules():
        if type(part) is nn.Linear:
            part.requires_grad_(False)
    return module


def beside_twelve(outside: int) -> nn.Module:
    """So many parameters in a table, twelve in a layer."""
    return nn.ModuleList([nn.Embedding(1, outside), nn.Linear(12, 1, bias=False)])


WORTH = [
    ("layers only", mlp),
    ("one layer", lambda: nn.Linear(WIDTH, WIDTH)),
    ("a block, whose norms are light", Block),
    ("a small table", lambda: embedding(5)),
    ("exactly a quarter", lambda: beside_twelve(4)),
    ("a large table that is not trained", lambda: embedding(1000, trained=False)),
    ("parameters of a user's module", Owning),
    ("a user's layer", lambda: OwnLinear(WIDTH, WIDTH)),
    ("a user's table", lambda: nn.Sequential(OwnEmbedding(100, WIDTH), nn.Linear(WIDTH, 1))),
    ("no parameters", nn.Tanh),
    ("none that is trained", lambda: embedding(1000).requires_grad_(False)),
]
NOT_WORTH = [
    ("a large table", lambda: embedding(1000)),
    ("a table alone", lambda: nn.Embedding(4, 4)),
    ("just above a quarter", lambda: beside_twelve(5)),
    ("norms only", lambda: nn.LayerNorm(WIDTH)),
    ("a convolution", lambda: nn.Conv1d(WIDTH, WIDTH, 3)),
    ("a bilinear layer", lambda: nn.Bilinear(4, 4, 4)),
    ("torch's attention", lambda: nn.MultiheadAttention(WIDTH, 2)),
    ("a block whose layers are not trained", lambda: frozen_layers(Block())),
]


@pytest.mark.parametrize(("name", "make"), WORTH)
def test_a_stage_of_layers_is_worth_a_split(name: str, make: Make) -> None:
    """Up to a quarter of what is trained may lie in other modules of torch's."""
    support = split_support(make(), insist=False)
    assert (support.mode, support.reason) == ("deferral", "")


@pytest.mark.parametrize(("name", "make"), NOT_WORTH)
def test_a_stage_mostly_of_other_parameters_is_not_worth_a_split(name: str, make: Make) -> None:
    """I would compute their gradients in any case and keep them until W; who insists gets it."""
    support = split_support(make(), insist=False)
    assert support.mode == "full"
    assert OUTSIDE in support.reason
    for insisting in (split_support(make()), split_support(make(), insist=True)):
        assert (insisting.mode, insisting.reason) == ("deferral", "")


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(3), nn.LazyBatchNorm1d])
def test_a_lazy_module_has_no_size_yet_and_is_asked_nothing(make: Make) -> None:
    """Its parameters have no elements that could be counted: no error before the first forward."""
    split_support(make(), insist=False)


@pytest.mark.parametrize(("case", "reason"), UNABLE, ids=str)
def test_a_stage_that_cannot_be_split_is_not_whoever_insists(case: Case, reason: str) -> None:
    """What stands in the way is the same, and told first."""
    for insist in (False, True):
        support = split_support(made(case), insist=insist)
        assert support.mode == "full"
        assert reason in support.reason


WHOLE = [
    Case("hooks", hooked, randn(2, 5, WIDTH)),
    Case("a large table", lambda: embedding(1000), ids(6), wants_gradient=False),
    Case("norms only", lambda: nn.LayerNorm(WIDTH), randn(6, WIDTH)),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_a_stage_runs_whole_without_a_warning(case: Case, place: str) -> None:
    """Built and run for two steps with every warning an error: bit for bit autograd's."""
    plain = made(case)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stage = make_stage(case, made(case), place, insist=False)
        for zero in (True, False):
            expected = run_fused(case, plain, place, zero=zero)
            got = run_split(case, stage, PUT_OFF, place, zero=zero)
            assert expected.differences(got) == []
            assert not stage.splits


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "case",
    [
        Case("layers", mlp, randn(6, WIDTH)),
        Case("block", Block, randn(2, 5, WIDTH)),
        Case("a small table", lambda: embedding(5), lambda _: (torch.arange(5),)),
        Case("own parameters", Owning, randn(6, WIDTH)),
    ],
    ids=str,
)
def test_a_stage_worth_it_is_split(case: Case, place: str) -> None:
    """I and W, bit for bit autograd's, over two steps."""
    plain = made(case)
    stage = make_stage(case, made(case), place, insist=False)
    for zero in (True, False):
        assert stage.splits
        expected = run_fused(case, plain, place, zero=zero)
        assert expected.differences(run_split(case, stage, PUT_OFF, place, zero=zero)) == []


def test_a_hidden_obstacle_is_found_without_a_warning() -> None:
    """Reentrant checkpointing that the first forward shows: I and W once, then B."""
    case = Case("hidden", lambda: HiddenReentrant(mlp()), randn(6, WIDTH))
    plain, stage = made(case), make_stage(case, made(case), MIDDLE, insist=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            assert stage.splits == (step == 0)
            expected = run_fused(case, plain, MIDDLE)
            assert expected.differences(run_split(case, stage, PUT_OFF, MIDDLE)) == []


def test_it_is_asked_again_before_every_step() -> None:
    """A table that is trained from the second step on, and frozen again for the third."""
    case = Case("thawed", lambda: embedding(1000), ids(6), wants_gradient=False)
    plain, module = made(case), made(case)
    stage = make_stage(case, module, MIDDLE, insist=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for trained in (False, True, False):
            for each in (plain, module):
                each[0].requires_grad_(trained)
            expected = run_fused(case, plain, MIDDLE)
            assert expected.differences(run_split(case, stage, PUT_OFF, MIDDLE)) == []
            assert stage.splits is not trained


def test_where_no_split_is_wanted_the_rule_is_nothing() -> None:
    """Under `bf`, a stage is whole whatever it is made of."""
    case = Case("layers", mlp, randn(6, WIDTH))
    for insist in (False, True):
        assert not make_stage(case, made(case), MIDDLE, split=False, insist=insist).splits

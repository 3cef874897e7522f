"""Gradients that are easily lost or spoilt when they are put off: leaves that come late or hide."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rrfp_async.errors import RrfpError
from tests.tasks.split_harness import (
    LAST,
    MIDDLE,
    PLACES,
    PUT_OFF,
    Case,
    StageRun,
    assert_bitwise,
    made,
    make_stage,
    run_fused,
    run_split,
)
from tests.tasks.split_models import WIDTH, Scale, mlp, randn

X, X3 = randn(6, WIDTH), randn(2, 5, WIDTH)


class Late(nn.Module):
    """Makes its layer once it knows the width."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.make = make
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.b is None:
            state = torch.get_rng_state()
            torch.manual_seed(2)
            self.b = self.make(x.shape[-1])
            torch.set_rng_state(state)
        return self.b(self.a(x))


LATE = [
    Case("a layer", partial(Late, lambda width: nn.Linear(width, 3)), X),
    Case("a parameter", partial(Late, lambda _: Scale()), X3),
]


@pytest.mark.parametrize("case", LATE, ids=str)
def test_a_forward_may_make_what_it_needs_in_the_first_step(case: Case) -> None:
    """Parameters that did not exist when the step began get their gradients in it."""
    assert_bitwise(case)


def lazy() -> nn.Module:
    """A layer that is materialised by the first forward."""
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.LazyLinear(4))


def test_a_lazy_layer_may_be_materialised_in_a_step() -> None:
    """Its parameters exist only once the first microbatch has run."""
    case = Case("lazy", lazy, X)
    for place in PLACES:
        torch.manual_seed(3)
        plain = lazy()
        torch.manual_seed(3)
        stage = make_stage(case, lazy(), place)
        expected = run_fused(case, plain, place)
        assert expected.differences(run_split(case, stage, PUT_OFF, place)) == []


class Hidden(nn.Module):
    """Layers and a tensor that it does not own as a module would."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.more = [nn.Linear(WIDTH, WIDTH)]
        self.scale = torch.tensor(1.5, requires_grad=True)

    def hidden(self) -> list[Tensor]:
        """The leaves that `parameters()` does not tell."""
        return [*self.more[0].parameters(), self.scale]

    def forward(self, x: Tensor) -> Tensor:
        return self.more[0](self.a(x)) * self.scale


@pytest.mark.parametrize("place", PLACES)
def test_leaves_that_are_no_parameters_of_the_stage_get_their_gradients(place: str) -> None:
    """Layers in a list and a tensor with requires_grad: as by autograd, not dropped."""
    case = Case("hidden", Hidden, X)
    plain, module = made(case), made(case)
    run_fused(case, plain, place)
    run_split(case, make_stage(case, module, place), PUT_OFF, place)
    for wanted, got in zip(plain.hidden(), module.hidden(), strict=True):
        assert got.grad is not None, "its gradient was dropped"
        assert torch.equal(wanted.grad, got.grad)


class Margin(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.margin = nn.Parameter(torch.tensor(0.5))

    def forward(self, output: Tensor, target: Any) -> Tensor:
        return (output - self.margin).pow(2).mean()


def test_a_loss_with_parameters_gets_its_gradients() -> None:
    """loss_fn may be a module that is trained by the caller, as without the split."""
    losses = [Margin(), Margin()]
    cases = [Case("margin", mlp, X, loss_fn=loss) for loss in losses]
    run_fused(cases[0], made(cases[0]), LAST)
    run_split(cases[1], make_stage(cases[1], made(cases[1]), LAST), PUT_OFF, LAST)
    wanted, got = (loss.margin.grad for loss in losses)
    assert got is not None, "its gradient was dropped"
    assert torch.equal(wanted, got)


class Buffered(nn.Module):
    """Hands every microbatch to its layer in one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.held = torch.zeros(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.held.copy_(x.detach())
        return self.b(self.a(self.held).tanh() + x)


def test_a_layers_input_that_is_written_to_before_w_is_never_a_wrong_gradient() -> None:
    """F0 I0 F1 W0 with one buffer for all microbatches: right, or refused as autograd refuses."""
    case = Case("buffered", Buffered, X, microbatches=2)
    expected = _one_by_one(case)
    run = StageRun(case, stage := make_stage(case, made(case), MIDDLE), MIDDLE)
    refused = None
    with run.step():
        run.forward(0)
        run.backward_input(0)
        run.forward(1)
        run.backward_input(1)
        try:
            run.backward_weight(0)
            run.backward_weight(1)
        except (RuntimeError, RrfpError) as error:
            refused = str(error)
    assert refused is None or "in place" in refused or "inplace" in refused, refused
    if refused is not None:
        return
    got = [parameter.grad for parameter in stage.module.parameters()]
    assert all(map(torch.equal, expected, got)), "W multiplied what another microbatch wrote"


def _one_by_one(case: Case) -> list[Tensor | None]:
    """Gradients of F0 B0 F1 B1."""
    run = StageRun(case, stage := make_stage(case, made(case), MIDDLE), MIDDLE)
    with run.step():
        for index in range(case.microbatches):
            run.forward(index)
            run.backward_input(index)
            run.backward_weight(index)
    return [parameter.grad for parameter in stage.module.parameters()]

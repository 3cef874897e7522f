"""I and W of stages that recompute, draw random numbers, or run a custom Function."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.tasks.split_harness import MICROBATCHES, Case, assert_bitwise, made, run_fused
from tests.tasks.split_models import (
    WIDTH,
    Applied,
    Block,
    Checkpointed,
    Counting,
    applied,
    linear,
    mlp,
    randn,
    transformer_layer,
)

X, X3 = randn(6, WIDTH), randn(2, 5, WIDTH)
STEPS = 2


def selective() -> Any:
    """Contexts that keep products and recompute the rest."""

    def policy(_context: Any, op: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Sharing(nn.Module):
    """One layer inside of a checkpoint and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inside = checkpoint(lambda y: self.layer(y).tanh(), x, use_reentrant=False)
        return self.layer(inside)


class OnCpu(nn.Module):
    """Keeps what autograd saves elsewhere."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return self.inside(x)


CASES = [
    Case("block", lambda: Checkpointed(Block()), X3),
    Case("block with dropout", lambda: Checkpointed(Block(dropout=0.3)), X3),
    Case("nn.TransformerEncoderLayer", lambda: Checkpointed(transformer_layer(0.3)), X3),
    Case("mlp 2-D", lambda: Checkpointed(mlp()), X),
    Case("mlp, inplace", lambda: Checkpointed(mlp(inplace=True)), X3),
    Case("layer alone", lambda: Checkpointed(nn.Linear(WIDTH, 3)), X3),
    Case("layer alone, no bias", lambda: Checkpointed(nn.Linear(WIDTH, 3, bias=False)), X3),
    Case("two in a row", lambda: nn.Sequential(Checkpointed(Block()), Checkpointed(Block())), X3),
    Case("nested", lambda: Checkpointed(nn.Sequential(Checkpointed(mlp()), nn.Tanh(), mlp())), X3),
    Case("nested last", lambda: Checkpointed(nn.Sequential(mlp(), Checkpointed(Block()))), X3),
    Case("not stopped early", lambda: Checkpointed(Block(), early_stop=False), X3),
    Case("checked for determinism", lambda: Checkpointed(Block(), determinism_check="default"), X3),
    Case("without dropout's state", lambda: Checkpointed(Block(), preserve_rng_state=False), X3),
    Case("selective", lambda: Checkpointed(Block(), context_fn=selective), X3),
    Case("inside and outside", Sharing, X3),
    Case("wrapper", lambda: checkpoint_wrapper(Block(), CheckpointImpl.NO_REENTRANT), X3),
    Case("inputs without gradient", lambda: Checkpointed(mlp()), X3, wants_gradient=False),
    Case("saved elsewhere", lambda: OnCpu(Block()), X3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_stage_that_recomputes_is_split_and_changes_no_bit(case: Case) -> None:
    """Hazard 13: parity, and recomputed as often as by autograd: once, and never by W."""
    plain = made(case)
    for zero in (True, False):
        run_fused(case, plain, "middle", zero=zero)
    expected = _forwards(plain)
    counts = [_forwards(module) for module in assert_bitwise(case)]
    assert counts == [expected] * len(counts)
    if case.name == "block":
        assert expected == [2 * MICROBATCHES * STEPS]


def _forwards(module: nn.Module) -> list[int]:
    return [part.forwards for part in module.modules() if isinstance(part, Counting)]


class Doubled(torch.autograd.Function):
    """Counts its backwards."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Doubled.backwards += 1
        return gradient * 2


def _around(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return applied(lambda m, x: m.b(function(m.a(x))), a=linear(), b=linear())


FUNCTIONS = [
    Case("before layers", applied(lambda m, x: m.a(Doubled.apply(x)), a=linear()), X3),
    Case("between layers", _around(Doubled.apply), X3),
    Case("after layers", applied(lambda m, x: Doubled.apply(m.a(x)), a=linear()), X),
    Case("alone with a weight", applied(lambda m, x: x @ Doubled.apply(m.a.weight), a=linear()), X),
    Case(
        "on a layer's own weight",
        applied(lambda m, x: m.a(x) @ Doubled.apply(m.a.weight), a=linear()),
        X,
    ),
]


@pytest.mark.parametrize("case", FUNCTIONS, ids=str)
def test_the_backward_of_a_custom_function_runs_once(case: Case) -> None:
    """Hazard 30: once for each microbatch, in I."""
    Doubled.backwards = 0
    runs = len(assert_bitwise(case))
    fused = STEPS * len(case.places)
    assert Doubled.backwards == MICROBATCHES * (STEPS * runs + fused)


def _checks_no_hook(calls: list[str]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = mlp()
        layer = module[0]
        layer.register_forward_pre_hook(lambda m, args: calls.append("before") or (args[0] * 2,))
        layer.register_forward_hook(lambda m, args, y: calls.append("after") or y * 2)
        layer.register_full_backward_hook(lambda m, gi, go: calls.append("back") or (gi[0] * 2,))
        layer.register_full_backward_pre_hook(lambda m, go: calls.append("seed") or (go[0] * 2,))
        return module

    return make


@pytest.mark.parametrize("inputs", [X, X3], ids=["2-D", "3-D"])
def test_hooks_of_a_layer_are_called_as_by_autograd(inputs: Any) -> None:
    """Forward, forward-pre, full backward and backward-pre hooks of a deferring layer."""
    calls: list[str] = []
    case = Case("hooks", _checks_no_hook(calls), inputs)
    runs = len(assert_bitwise(case)) + len(case.places)
    for name in ("before", "after", "back", "seed"):
        assert calls.count(name) == runs * STEPS * MICROBATCHES


def test_a_tensor_hook_inside_is_called_once() -> None:
    """A hook on an activation changes its gradient once."""

    def hooked(module: Applied, x: Tensor) -> Tensor:
        hidden = module.a(x)
        hidden.register_hook(lambda gradient: gradient * 3)
        return module.b(hidden)

    assert_bitwise(Case("tensor hook", applied(hooked, a=linear(), b=linear()), X3))


def test_an_activation_may_retain_its_gradient() -> None:
    """`retain_grad` of an activation: kept by I as by autograd."""
    kept: list[Tensor] = []

    def retaining(module: Applied, x: Tensor) -> Tensor:
        hidden = module.a(x)
        hidden.retain_grad()
        kept.append(hidden)
        return module.b(hidden)

    assert_bitwise(
        Case("retained", applied(retaining, a=linear(), b=linear()), X3, places=("last",))
    )
    gradients = [hidden.grad for hidden in kept]
    assert all(gradient is not None for gradient in gradients)
    fused = gradients[:MICROBATCHES]
    assert all(map(torch.equal, gradients[-MICROBATCHES:], fused))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_after_and_before_layers(p: float) -> None:
    """The same seed, the same bits."""
    make = partial(nn.Sequential, nn.Dropout(p), nn.Linear(WIDTH, 8), nn.Dropout(p))
    assert_bitwise(Case("dropout", lambda: make(nn.Linear(8, 8)), X3))

"""Which stages cannot be split, how that is found out and said, and that they are right as a whole.

Found before the first step where the module tells, else by the graph of its first forward.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from rrfp_async.tasks.split_support import split_support
from tests.tasks.split_harness import (
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
from tests.tasks.split_models import (
    WIDTH,
    Applied,
    Block,
    Checkpointed,
    applied,
    linear,
    mlp,
    randn,
)

X, X3 = randn(6, WIDTH), randn(2, 5, WIDTH)


def hooked() -> nn.Module:
    """Doubles the gradient of one weight."""
    module = mlp()
    module[2].weight.register_hook(lambda gradient: gradient * 2)
    return module


def hooked_bias() -> nn.Module:
    """Doubles the gradient of a bias."""
    module = mlp()
    module[0].bias.register_hook(lambda gradient: gradient * 2)
    return module


def _halve_gradient(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


def hooked_after() -> nn.Module:
    """Halves an accumulated gradient in place."""
    module = mlp()
    module[0].weight.register_post_accumulate_grad_hook(_halve_gradient)
    return module


def compiled_in_place() -> nn.Module:
    """A module that compiles itself."""
    module = mlp()
    module[0].compile(backend="aot_eager")
    return module


def compiled() -> nn.Module:
    """A compiled module inside."""
    return nn.Sequential(torch.compile(mlp(), backend="aot_eager"), nn.Linear(WIDTH, 3))


def compiled_as_a_whole() -> nn.Module:
    """A compiled module."""
    return torch.compile(mlp(), backend="aot_eager")


class Reentrant(nn.Module):
    """Recomputes by reentering autograd, and says so in its forward."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=True)


def _recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=True)


class HiddenReentrant(nn.Module):
    """Does so in a function that its own source does not show."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.outside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(_recomputed(self.inside, x))


class FullyShardedDataParallel(nn.Module):
    """Called as torch's wrapper is."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


class DistributedDataParallel(FullyShardedDataParallel):
    """Another."""


class FSDPModule:
    """What torch's `fully_shard` mixes into a module's class."""


class FSDPLinear(FSDPModule, nn.Linear):
    """A layer so mixed."""


UNABLE = [
    (Case("hook on a weight", hooked, X3), "has hooks"),
    (Case("hook on a bias", hooked_bias, X), "has hooks"),
    (Case("hook after accumulation", hooked_after, X3), "has hooks"),
    (Case("module.compile()", compiled_in_place, X), "compiled"),
    (Case("torch.compile inside", compiled, X3), "compiled"),
    (Case("torch.compile", compiled_as_a_whole, X), "compiled"),
    (Case("reentrant", lambda: Reentrant(Block()), X3), "reentrant"),
    (Case("reentrant deep inside", lambda: nn.Sequential(mlp(), Reentrant(mlp())), X), "reentrant"),
    (
        Case("reentrant wrapper", lambda: checkpoint_wrapper(mlp(), CheckpointImpl.REENTRANT), X),
        "reentrant",
    ),
    (Case("FSDP", lambda: FullyShardedDataParallel(mlp()), X), "FullyShardedDataParallel"),
    (Case("DDP inside", lambda: nn.Sequential(DistributedDataParallel(mlp())), X), "DataParallel"),
    (Case("FSDP2", lambda: nn.Sequential(FSDPLinear(WIDTH, 3)), X), "FSDPModule"),
]


@pytest.fixture(autouse=True)
def _compiles_afresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(("case", "reason"), UNABLE, ids=str)
def test_a_stage_that_cannot_be_split_is_told_once_and_run_whole(case: Case, reason: str) -> None:
    """One RuntimeWarning for each stage built, naming it and why; bit for bit autograd's."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        stages = assert_bitwise(case, [PUT_OFF], mode="full")
    ours = _ours(told)
    assert len(ours) == len(stages), ours
    assert all("stage 1" in text and reason in text for text in ours), ours


def _ours(told: list[warnings.WarningMessage]) -> list[str]:
    """The messages that are about a split."""
    return [str(w.message) for w in told if w.category is RuntimeWarning and "split" in str(w)]


@pytest.mark.parametrize(("case", "reason"), UNABLE, ids=str)
def test_support_is_told_before_anything_runs(case: Case, reason: str) -> None:
    """`split_support` of the module: full, and why."""
    support = split_support(made(case))
    assert support.mode == "full"
    assert reason in support.reason


def test_nothing_is_warned_of_where_no_split_is_wanted() -> None:
    """A stage under a hint without I and W may have hooks."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hint = Case("hooks", hooked, X)
        stage = make_stage(hint, made(hint), MIDDLE, split=False)
    assert not stage.splits


class OnlySaysSo(nn.Module):
    """Speaks of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()

    def forward(self, x: Tensor) -> Tensor:
        """Never with use_reentrant=True: it does not go with a pipeline."""
        return checkpoint(self.inside, x, use_reentrant=False)  # not use_reentrant=True


def _with_module_hooks() -> nn.Module:
    module = mlp()
    module.register_forward_hook(lambda m, args, y: y)
    module[0].register_full_backward_hook(lambda m, gi, go: None)
    return module


ABLE = [
    ("frozen parameters with hooks elsewhere", lambda: nn.Sequential(mlp(), nn.Identity())),
    ("non-reentrant checkpoints", lambda: Checkpointed(Block())),
    ("the non-reentrant wrapper", lambda: checkpoint_wrapper(mlp(), CheckpointImpl.NO_REENTRANT)),
    ("hooks of modules", _with_module_hooks),
    ("a layer without parameters", nn.Tanh),
    ("a lazy layer", lambda: nn.LazyLinear(3)),
    ("words about reentrant checkpoints", OnlySaysSo),
]


@pytest.mark.parametrize(("name", "make"), ABLE)
def test_what_can_be_split_is_not_held_to_be_whole(
    name: str, make: Callable[[], nn.Module]
) -> None:
    """Falling back where it is not needed is a failure."""
    assert split_support(make()).mode == "deferral"


# -- what only a graph tells -------------------------------------------------------------------

HIDDEN = [
    Case("block", lambda: HiddenReentrant(Block()), X3),
    Case("mlp", lambda: HiddenReentrant(mlp()), X),
    Case("two in a row", lambda: nn.Sequential(HiddenReentrant(mlp()), HiddenReentrant(mlp())), X),
    Case("a parameter that is no layer's", lambda: HiddenReentrant(nn.LayerNorm(WIDTH)), X3),
    pytest.param(
        Case(
            "beside a deferring use of the same layer",
            applied(lambda m, x: m.a(_recomputed(m.a, x)), a=linear()),
            X,
        ),
        marks=pytest.mark.xfail(strict=True, reason="docs/design.md: to rounding"),
    ),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", HIDDEN, ids=str)
def test_a_hidden_reentrant_checkpoint_is_found_by_the_first_forward(
    case: Case, place: str
) -> None:
    """The first step is right, bit for bit, with I and W; one warning; then B."""
    plain = made(case)
    stage = make_stage(case, made(case), place)
    assert stage.split_choice.support.mode == "deferral"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step, zero in enumerate((True, False, True)):
            assert stage.splits == (step == 0)
            expected = run_fused(case, plain, place, zero=zero)
            differences = expected.differences(run_split(case, stage, PUT_OFF, place, zero=zero))
            assert differences == [], f"step {step}"
    assert stage.split_choice.support.mode == "full"
    [text] = _ours(told)
    assert "stage 1" in text
    assert "reentrant" in text


class SometimesReentrant(nn.Module):
    """Saves memory on the second microbatch and later."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(self.a(x) if self.calls == 1 else _recomputed(self.a, x))


@pytest.mark.parametrize("place", PLACES)
def test_a_reentrant_checkpoint_of_a_later_microbatch_does_no_harm(place: str) -> None:
    """Not in the first forward ever, but in the second: still right."""
    case = Case("sometimes reentrant", SometimesReentrant, X)
    plain, stage = made(case), make_stage(case, made(case), place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for zero in (True, False):
            expected = run_fused(case, plain, place, zero=zero)
            got = run_split(case, stage, PUT_OFF, place, zero=zero)
            assert expected.differences(got) == []


# -- what changes after the stage was built ----------------------------------------------------


def _doubles(module: nn.Module) -> None:
    module[0].weight.register_hook(lambda gradient: gradient * 2)


def _halves(module: nn.Module) -> None:
    module[2].weight.register_post_accumulate_grad_hook(_halve_gradient)


def _compiles(module: nn.Module) -> None:
    module[0].compile(backend="aot_eager")


@pytest.mark.parametrize("change", [_doubles, _halves, _compiles])
@pytest.mark.parametrize("when", [0, 1], ids=["before the first step", "after it"])
def test_a_stage_that_becomes_unable_is_found_out(
    change: Callable[[nn.Module], None], when: int
) -> None:
    """Hooks and compilation that come after the Runtime was built: right, and warned of."""
    case = Case("changed", mlp, X)
    plain, module = made(case), made(case)
    stage = make_stage(case, module, MIDDLE)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(3):
            if step == when:
                change(plain)
                change(module)
            expected = run_fused(case, plain, MIDDLE)
            assert expected.differences(run_split(case, stage, PUT_OFF, MIDDLE)) == []
    [text] = _ours(told)
    assert "stage 1" in text


def test_a_stage_not_set_up_to_split_refuses_i() -> None:
    """I of a stage that runs whole is an error, not a half."""
    case = Case("hooks", hooked, X)
    with pytest.warns(RuntimeWarning, match="stage 1"):
        stage = make_stage(case, made(case), MIDDLE)
    run = StageRun(case, stage, MIDDLE)
    with run.step():
        run.forward(0)
        with pytest.raises(Exception, match="not set up to split"):
            run.backward_input(0)


def test_the_linear_of_a_parameterless_stage_is_nothing_to_split() -> None:
    """No parameter, or none that is trained: B, without a warning."""
    for make in (nn.Tanh, lambda: mlp().requires_grad_(False)):
        case = Case("nothing to train", make, X)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            stage = make_stage(case, made(case), MIDDLE)
            assert not stage.splits
            expected = run_fused(case, made(case), MIDDLE)
            assert expected.differences(run_split(case, stage, PUT_OFF, MIDDLE)) == []


def test_support_of_an_applied_function_does_not_depend_on_its_source() -> None:
    """A module whose source cannot be read can be split."""
    namespace: dict[str, Any] = {"nn": nn}
    exec("class Made(nn.Linear):\n    def forward(self, x): return x @ self.weight\n", namespace)
    module = Applied(lambda m, x: m.a(x), a=namespace["Made"](WIDTH, WIDTH))
    assert split_support(module).mode == "deferral"

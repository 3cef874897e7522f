"""A layer with an autograd function of its own leaves its weight's gradient until W.

Its backward is that of any other layer where nobody collects, and the same bits where somebody
does.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import rrfp_async as r
from tests.tasks.split_harness import (
    ALL_ORDERS,
    AT_ONCE,
    LAST,
    MICROBATCHES,
    MIDDLE,
    Case,
    StageRun,
    assert_bitwise,
    made,
    make_stage,
)
from tests.tasks.split_models import WIDTH, randn

ROWS = 6
Compute = Callable[[Tensor, Tensor], Tensor]


def product(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of the weight of `_Scaled`."""
    return 2 * gradient.t() @ x


class _Scaled(torch.autograd.Function):
    """2 * x @ weight.t(), as docs/hints.md shows it; `told` is what the layer wants to know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, told: "Scaled") -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.store = r.weight_grad_store()
        ctx.told = told
        return 2 * x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, told = 2 * gradient @ weight, ctx.told

        def compute(gradient: Tensor, x: Tensor) -> Tensor:
            told.computed += 1
            return told.compute(gradient, x)

        operand = x if told.scratch is None else told.scratch.copy_(x)
        told.taken.append(ctx.store.put(weight, compute, gradient, operand))
        return for_x, None if told.taken[-1] else compute(gradient, operand), None


class Scaled(nn.Module):
    """A layer that uses the store.

    Attributes:
        taken: What `put` returned, each time.
        computed: How often the gradient was computed.
        scratch: Where the kept operand lies, if it is not what came in.
    """

    def __init__(self, compute: Compute = product, scratch: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.compute, self.scratch = compute, scratch
        self.taken: list[bool] = []
        self.computed = 0

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, width)` in, the same out."""
        return self.scaled(x, self.weight)

    def scaled(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same with another weight."""
        y: Tensor = _Scaled.apply(x, weight, self)
        return torch.tanh(y)


class Twice(Scaled):
    """Its weight is used twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Thrice(Scaled):
    """Its weight is used three times, by the same way."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(super().forward(x)))


class Shared(Scaled):
    """Its weight is that of a Linear too, which comes first or last."""

    def __init__(self, *, linear_first: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight = self.weight
        self.linear_first = linear_first

    def forward(self, x: Tensor) -> Tensor:
        if self.linear_first:
            return super().forward(self.linear(x))
        return self.linear(super().forward(x))


class BesideLinears(Scaled):
    """Its weight is used by a Linear, itself and the Linear again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight = self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(super().forward(self.linear(x)))


class Mixed(Scaled):
    """Its weight is used by itself, by a plain product and by itself again."""

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(super().forward(x), self.weight)
        return super().forward(y)


class Penalized(Scaled):
    """Its weight is used by itself and once by a plain product."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(super().forward(x), self.weight)


class Frozen(Scaled):
    """Its weight is frozen; that of its Linear is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.linear(x))


class Reckoned(Scaled):
    """The weight that it uses is made from the parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, 1.5 * self.weight)


class Checkpointed(Scaled):
    """It runs again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


def case_of(make: Callable[[], nn.Module]) -> Case:
    """Batches of six vectors."""
    return Case("a layer with a store", make, randn(ROWS, WIDTH))


def split_run(make: Callable[[], Scaled], place: str = LAST) -> tuple[Scaled, StageRun]:
    """The layer as a stage whose backward is split, and a step of it to be driven by hand."""
    case = case_of(make)
    module = made(case)
    assert isinstance(module, Scaled)
    return module, StageRun(case, make_stage(case, module, place), place)


# -- bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [Scaled, Twice, Thrice, Shared, lambda: Shared(linear_first=False), Mixed, Penalized]
)
def test_i_and_w_are_the_fused_backward_bit_for_bit(make: Callable[[], Scaled]) -> None:
    """Loss, input gradients and the weight's, in any order of I and with W put off."""
    assert_bitwise(case_of(make), ALL_ORDERS)


@pytest.mark.parametrize(
    "make",
    [
        BesideLinears,
        Frozen,
        Reckoned,
        Checkpointed,
    ],
)
def test_what_a_weight_may_also_be_does_not_change_the_bits(make: Callable[[], Scaled]) -> None:
    """Used by two kinds of layers in turn, frozen, no leaf, or saved under hooks."""
    assert_bitwise(case_of(make))


@pytest.mark.parametrize(
    "budget",
    [
        pytest.param(None, id="no budget"),
        pytest.param(10**9, id="a budget"),
    ],
)
async def test_a_split_step_has_the_bits_of_the_unpartitioned_model(budget: int | None) -> None:
    """Three stages, four microbatches of unequal sizes, any arrival order; W computed each."""
    torch.manual_seed(3)
    microbatches, seeds = 4, range(3)
    stages = [Scaled(), Twice(), Shared()]
    batch, target = torch.randn(10, WIDTH), torch.randn(10, WIDTH)
    reference = copy.deepcopy(nn.Sequential(*stages))
    parts = zip(batch.tensor_split(microbatches), target.tensor_split(microbatches), strict=True)
    for part, wanted in parts:
        loss = functional.mse_loss(reference(part), wanted)
        (loss * (len(part) / len(batch))).backward()
    config = r.Config(microbatches=microbatches, hint="bfw", activation_budget_bytes=budget)

    async def main(world: r.World, mine: list[Scaled], seed: int) -> None:
        async with r.Runtime(
            mine[world.rank],
            world=r.with_delays(world, r.Delays(seed)),
            config=config,
            loss_fn=functional.mse_loss,
        ) as runtime:
            await runtime.train_step(batch, target=target)

    for seed in seeds:
        mine = copy.deepcopy(stages)
        await r.run_local(3, lambda world, mine=mine, seed=seed: main(world, mine, seed))
        if budget is None:
            assert all(all(stage.taken) for stage in mine)
        assert [stage.computed for stage in mine] == [n * microbatches for n in (1, 2, 1)]
        got = dict(nn.Sequential(*mine).named_parameters())
        for name, parameter in reference.named_parameters():
            assert got[name].grad is not None, f"{name} got no gradient"
            assert torch.equal(got[name].grad, parameter.grad), f"{name}, delay seed {seed}"


# -- when it is computed -------------------------------------------------------------------------


def test_put_takes_nothing_where_nobody_splits() -> None:
    """Not in plain autograd, nor in a stage with whole backwards; the gradient is computed."""
    case = case_of(Scaled)
    alone, whole = made(case), made(case)
    alone(randn(ROWS, WIDTH)(0)[0]).sum().backward()
    run = StageRun(case, make_stage(case, whole, LAST, split=False), LAST)
    with run.step():
        run.forward(0)
        run.backward(0)
    for layer in (alone, whole):
        assert (layer.taken, layer.computed) == ([False], 1)
    assert r.weight_grad_store().put(alone.weight, product, torch.ones(1), torch.ones(1)) is False


@pytest.mark.parametrize("place", [LAST, MIDDLE])
def test_w_and_not_i_computes_the_gradient(place: str) -> None:
    """After I nothing was computed and `.grad` is as before; after W once, and `.grad` moved."""
    layer, run = split_run(Scaled, place)
    with run.step(zero=False):
        run.forward(0)
        run.backward_input(0)  # checks every .grad
        assert (layer.taken, layer.computed) == ([True], 0)
        assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, 7.0))
        run.backward_weight(0)
    assert layer.computed == 1
    assert not torch.equal(layer.weight.grad, torch.full_like(layer.weight, 7.0))


@pytest.mark.parametrize("make", [Scaled, Thrice, Shared, Penalized])
def test_contributions_of_one_kind_or_at_most_two_are_deferred(
    make: Callable[[], Scaled],
) -> None:
    """In the first step already."""
    assert all(taken_in_two_steps(make))


def test_three_contributions_by_different_ways_are_not_deferred() -> None:
    """Only autograd knows in which order it adds them: in the second step too."""
    taken = taken_in_two_steps(Mixed)
    assert taken
    assert not any(taken)


def taken_in_two_steps(make: Callable[[], Scaled]) -> list[bool]:
    """What `put` returned."""
    case = case_of(make)
    layer = made(case)
    stage = make_stage(case, layer, LAST)
    for _ in range(2):
        run = StageRun(case, stage, LAST)
        with run.step():
            for index in range(MICROBATCHES):
                run.forward(index)
            for kind, index in AT_ONCE.tasks():
                (run.backward_input if kind == "I" else run.backward_weight)(index)
    return layer.taken


# -- what goes wrong -----------------------------------------------------------------------------


def test_an_operand_that_was_written_to_is_an_error_that_names_the_shape() -> None:
    """Between I and W."""
    layer, run = split_run(lambda: Scaled(scratch=torch.zeros(ROWS, WIDTH)))
    with run.step():
        run.forward(0)
        run.backward_input(0)
        layer.scratch.zero_()
        with pytest.raises(RuntimeError) as raised:
            run.backward_weight(0)
    assert f"a weight {(WIDTH, WIDTH)} was modified in place before W" in str(raised.value)
    assert layer.computed == 0


def test_an_operand_that_is_reused_for_another_microbatch_is_an_error() -> None:
    """The second I writes over what the first one kept; written before its own I it may be."""
    _, run = split_run(lambda: Scaled(scratch=torch.zeros(ROWS, WIDTH)))
    with run.step():
        for index in range(2):
            run.forward(index)
        for index in range(2):
            run.backward_input(index)
        with pytest.raises(RuntimeError, match="do not reuse it for another microbatch"):
            run.backward_weight(0)
        run.backward_weight(1)


def test_a_gradient_of_another_shape_is_an_error_that_names_both() -> None:
    """And leaves the weight's `.grad` as it was."""
    layer, run = split_run(lambda: Scaled(lambda gradient, x: product(gradient, x)[1:]))
    with run.step(zero=False):
        run.forward(0)
        run.backward_input(0)
        with pytest.raises(RuntimeError) as raised:
            run.backward_weight(0)
    assert f"a weight {(WIDTH, WIDTH)} has the shape {(WIDTH - 1, WIDTH)}" in str(raised.value)
    assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, 7.0))

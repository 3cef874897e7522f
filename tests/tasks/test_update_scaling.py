"""The loss scale on several ranks, beside torch's GradScaler on the unpartitioned model."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from rrfp_async.tasks.update import GradientReport, Update, Verdict
from tests.tasks.update_ranks import (
    BF16,
    F32,
    F64,
    MakeOptimizer,
    Ranks,
    assert_same,
    backward,
    end,
    every_place,
    model_of,
    parameter,
    plant,
    scaler_of,
    sgd,
)

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": sgd,
    "Adam": lambda held: torch.optim.Adam(held, lr=0.01),
    "fused Adam": lambda held: torch.optim.Adam(held, lr=0.01, fused=True),
}
Spoil = Callable[[nn.Sequential], None]


def scaled_steps(
    reference: nn.Sequential,
    ranks: Ranks,
    make: MakeOptimizer,
    scaler: torch.amp.GradScaler,
    *,
    max_norm: float | None,
    spoil: Mapping[int, Spoil],
) -> list[bool]:
    """Eight steps of both, the gradients of some spoilt; whether each was taken."""
    optimizer = make(list(reference.parameters()))
    taken = []
    for step in range(8):
        backward(reference, step, scaler.scale(torch.ones(())))
        ranks.backward(step)
        for model in (reference, ranks.model):
            if step in spoil:
                spoil[step](model)
        scaler.unscale_(optimizer)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        taken.append(ranks.end().finite)
        if taken[-1]:
            assert_same(ranks.model, reference)
        assert ranks.scales() == [scaler.state_dict()] * len(ranks.updates)
    reference.zero_grad()
    ranks.model.zero_grad()
    assert_same(ranks.model, reference)
    return taken


@every_place
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_scaled_steps_have_the_bits_of_torchs_own(
    owners: Sequence[int], make: MakeOptimizer, max_norm: float | None
) -> None:
    """An inf in one stage skips the step and backs the scale off everywhere; it grows again."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    reference = model_of(F32)
    ranks = Ranks(copy.deepcopy(reference), owners, make, max_grad_norm=max_norm, scaler=scaler)
    spoil = {3: lambda model: plant(model, 2), 6: lambda model: plant(model, 0, math.nan)}
    taken = scaled_steps(reference, ranks, make, scaler, max_norm=max_norm, spoil=spoil)
    assert taken == [True, True, True, False, True, True, False, True]
    assert scaler.get_scale() == 2.0**10  # grown after steps 1 and 5, backed off after 3 and 6


def test_scaled_steps_of_mixed_precision_have_the_bits_of_torchs_own() -> None:
    """fp32, bf16 and fp64, a scale that is no power of two, and one too large to begin with."""
    scaler = torch.amp.GradScaler("cpu", 3e38, growth_factor=1.7, backoff_factor=1e-6)
    reference, make = model_of(BF16, F32, BF16, F64), sgd
    ranks = Ranks(copy.deepcopy(reference), (0, 1, 1, 2), make, max_grad_norm=0.5, scaler=scaler)
    taken = scaled_steps(reference, ranks, make, scaler, max_norm=0.5, spoil={})
    assert not taken[0]
    assert taken[-1]


def test_ranks_without_an_optimizer_parameters_or_gradients_keep_their_scale_in_step() -> None:
    """Growth and backoff come from the ranks that have gradients."""
    weights = [parameter(8.0), parameter(8.0), parameter(None)]
    scalers = [scaler_of() for _ in range(4)]
    updates = [
        Update(torch.optim.SGD(weights[:1], lr=1.0), {0: weights[:1]}, grad_scaler=scalers[0]),
        Update(None, {1: weights[1:2]}, grad_scaler=scalers[1]),
        Update(torch.optim.SGD(weights[2:], lr=1.0), {2: weights[2:]}, grad_scaler=scalers[2]),
        Update(None, {}, grad_scaler=scalers[3]),
    ]
    seen = []
    for step in range(5):
        weights[0].grad = torch.full((3,), math.inf if step == 3 else 8.0)
        assert end(updates).finite == (step != 3)
        seen.append([scaler.get_scale() for scaler in scalers])
    assert seen == [[scale] * 4 for scale in (8.0, 16.0, 16.0, 8.0, 8.0)]
    assert weights[0].tolist() == [-1.0 - 1.0 - 0.5 - 1.0] * 3


def test_gradients_that_no_optimizer_holds_are_unscaled_counted_and_clipped() -> None:
    """What is left for the caller to read is true, and one factor is on all of it."""
    held, kept = parameter(4.0 * 8), parameter(3.0 * 8)
    update = Update(
        torch.optim.SGD([held], lr=1.0),
        {0: [held, kept]},
        max_grad_norm=1.0,
        grad_scaler=scaler_of(),
    )
    expected = [parameter(4.0), parameter(3.0)]
    norm = nn.utils.clip_grad_norm_(expected, 1.0)
    assert end([update]).grad_norm == norm.item()
    assert torch.equal(kept.grad, expected[1].grad)
    assert torch.equal(held.detach(), -expected[0].grad)
    assert kept.tolist() == [0.0] * 3


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_bad_gradient_that_no_optimizer_holds_skips_the_step_everywhere(value: float) -> None:
    """Its microbatches were computed with the same scale."""
    held, kept = parameter(8.0), parameter(value)
    optimizer = torch.optim.SGD([held], lr=1.0)
    updates = [
        Update(optimizer, {0: [held]}, grad_scaler=scaler_of()),
        Update(None, {1: [kept]}, grad_scaler=scaler_of()),
    ]
    assert not end(updates).finite
    assert held.tolist() == [0.0] * 3


def test_a_skipped_step_leaves_gradients_unscaled_and_not_clipped() -> None:
    """They show where the inf was."""
    good, bad = parameter(8.0), parameter(math.inf)
    options: dict[str, Any] = {"max_grad_norm": 0.1}
    updates = [
        Update(None, {stage: [each]}, grad_scaler=scaler_of(), **options)
        for stage, each in enumerate((good, bad))
    ]
    result = end(updates)
    assert (result.grad_norm, result.finite) == (math.inf, False)
    assert good.grad.tolist() == [1.0] * 3


def test_the_loss_scale_is_the_scalers_until_the_step_ends() -> None:
    """A float32 scalar that the update does not change under its reader."""
    weight, scaler = parameter(math.inf), scaler_of()
    update = Update(None, {0: [weight]}, grad_scaler=scaler)
    before = update.loss_scale()
    assert before is not None
    end([update])
    after = update.loss_scale()
    assert (before.dtype, before.shape, before.item()) == (F32, (), 8.0)
    assert after is not None
    assert after.item() == scaler.get_scale() == 4.0


def test_a_scaler_that_is_not_enabled_is_none() -> None:
    """No scale, nothing unscaled, and the step is taken whatever the gradients are."""
    weight = parameter(math.inf)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    update = Update(optimizer, {0: [weight]}, grad_scaler=scaler_of(enabled=False))
    assert update.loss_scale() is None
    assert update.report() == GradientReport(None, True, None)
    assert end([update]) == Verdict(None, None, True)
    assert weight.tolist() == [-math.inf] * 3

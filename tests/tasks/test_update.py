"""A step's end on several ranks, beside torch's own on the unpartitioned model: bit for bit."""

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rrfp_async.errors import ProtocolError, StateError
from rrfp_async.tasks.update import GradientReport, Update, Verdict, verdict
from tests.tasks.update_ranks import (
    BF16,
    F32,
    F64,
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

PRECISIONS: dict[str, Callable[[], nn.Sequential]] = {
    "fp32": lambda: model_of(F32),
    "fp64": lambda: model_of(F64),
    "bf16": lambda: model_of(BF16),
    "bf16, norms in fp32": lambda: model_of(BF16, of_norms=F32),
    "stages in fp32 and bf16": lambda: model_of(F32, BF16),
    "stages in bf16, fp32 and fp64": lambda: model_of(BF16, F32, F64),
}

# -- clipping ---------------------------------------------------------------------------------


@every_place
@pytest.mark.parametrize("make_model", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_by_ranks_has_the_bits_of_torchs_own(
    owners: Sequence[int], make_model: Callable[[], nn.Sequential], max_norm: float
) -> None:
    """The norm, every gradient and every parameter, over three steps, clipped and not."""
    reference = make_model()
    ranks = Ranks(make_model(), owners, sgd, max_grad_norm=max_norm)
    optimizer = sgd(list(reference.parameters()))
    for step in range(3):
        backward(reference, step, None)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        assert (norm > max_norm) == (max_norm < 1)  # one case clips, the other does not
        optimizer.step()
        ranks.backward(step)
        assert ranks.end() == Verdict(norm.item(), str(norm.dtype).removeprefix("torch."), True)
        assert_same(ranks.model, reference)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_without_a_scaler_a_norm_that_is_not_finite_clips_as_torch_does(value: float) -> None:
    """What `error_if_nonfinite=False` makes of it: zeros and NaN, and the step is taken."""
    reference = model_of(F32)
    ranks = Ranks(copy.deepcopy(reference), (0, 1, 2, 2), sgd, max_grad_norm=1.0)
    optimizer = sgd(list(reference.parameters()))
    backward(reference, 0, None)
    plant(reference, 1, value)
    nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    optimizer.step()
    ranks.backward(0)
    plant(ranks.model, 1, value)
    assert ranks.end().finite
    assert_same(ranks.model, reference)


def test_without_any_gradient_the_norm_is_zero() -> None:
    """As torch says of no gradients."""
    ranks = Ranks(model_of(F32), (0, 1, 0, 1), max_grad_norm=1.0)
    assert ranks.end() == Verdict(0.0, "float32", True)


def test_a_tied_copy_is_clipped_and_not_counted() -> None:
    """The norm is that of the weights proper; the copy keeps the same gradient as its original."""
    proper, other = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(3))
    proper.grad, other.grad = torch.full((5,), 2.0), torch.full((3,), 4.0)
    tied = nn.Parameter(torch.zeros(5))
    tied.grad = proper.grad.clone()
    counted = [copy.deepcopy(proper), copy.deepcopy(other)]
    for each, original in zip(counted, (proper, other), strict=True):
        each.grad = original.grad.clone()
    norm = nn.utils.clip_grad_norm_(counted, 1.0)
    first = Update(None, {0: [proper]}, max_grad_norm=1.0)
    last = Update(None, {1: [other, tied]}, max_grad_norm=1.0, not_counted={id(tied)})
    assert end([first, last]).grad_norm == norm.item()
    assert torch.equal(tied.grad, proper.grad)
    assert torch.equal(proper.grad, counted[0].grad)
    assert torch.equal(other.grad, counted[1].grad)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_sharded_gradient_is_unscaled_counted_and_clipped_as_a_whole_one(mesh: Any) -> None:
    """A rank's DTensor and another's plain tensor: the same norm and the same bits."""
    whole = parameter(8.0 * 2)
    sharded = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Shard(0)]))
    sharded.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
    verdicts = []
    for each in (sharded, whole):
        held = {0: [each]}, {1: [parameter(8.0 * 3)]}
        updates = [
            Update(None, of_rank, max_grad_norm=1.0, grad_scaler=scaler_of()) for of_rank in held
        ]
        verdicts.append(end(updates))
    assert verdicts[0] == verdicts[1]
    assert torch.equal(sharded.grad.full_tensor(), whole.grad)


# -- the optimizer ----------------------------------------------------------------------------


@pytest.fixture
def stepped() -> Iterator[list[object]]:
    """The optimizers that stepped, as torch's hook for all of them saw it."""
    seen: list[object] = []
    handle = register_optimizer_step_pre_hook(
        lambda optimizer, _args, _kwargs: seen.append(optimizer)
    )
    yield seen
    handle.remove()


def test_hooks_see_the_users_optimizer_alone_and_no_skipped_step(stepped: list[object]) -> None:
    """What stands in for one inside the scaler is none."""
    weight = parameter(8.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    update = Update(optimizer, {0: [weight]}, grad_scaler=scaler_of(), max_grad_norm=1.0)
    end([update])
    assert stepped == [optimizer]
    weight.grad = torch.full((3,), math.inf)
    end([update])
    assert stepped == [optimizer]


def test_a_learning_rate_scheduler_finds_its_optimizer_stepped() -> None:
    """It warns of its order only if the first step was skipped, as beside torch's own scaler."""
    weight = parameter(8.0)
    for gradient, warned in ((8.0, 0), (math.inf, 1)):
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        weight.grad = torch.full((3,), gradient)
        end([Update(optimizer, {0: [weight]}, grad_scaler=scaler_of())])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            scheduler.step()
        assert len(seen) == warned


class OwnScaling(torch.optim.SGD):
    """An optimizer that would take over the unscaling of gradients, in the old way."""

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        assert grad_scaler is None
        return super().step(closure)


def test_an_optimizer_that_scales_by_itself_gets_unscaled_gradients() -> None:
    """Nothing is divided twice, and nobody is warned."""
    weight = parameter(8.0)
    optimizer = OwnScaling([weight], lr=1.0)
    optimizer._step_supports_amp_scaling = True
    assert end([Update(optimizer, {0: [weight]}, grad_scaler=scaler_of())]).finite
    assert weight.tolist() == [-1.0] * 3


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, "1", torch.ones(())])
def test_a_max_grad_norm_that_is_no_positive_number_is_refused(value: Any) -> None:
    """Value, rule and remedy."""
    told = re.escape(f"max_grad_norm={value!r} must be a finite number above 0, or None")
    with pytest.raises(ValueError, match=f"^{told} for no clipping: give max_grad_norm=1.0$"):
        Update(None, {}, max_grad_norm=value)


@pytest.mark.parametrize("value", [65536.0, True, torch.ones(())])
def test_a_scaler_that_is_none_of_torchs_is_refused(value: Any) -> None:
    """Its type, the rule and the remedy."""
    told = f"^grad_scaler of type {type(value).__name__} must be a torch.amp.GradScaler or None"
    with pytest.raises(ValueError, match=rf"{told}: give every rank its own torch.amp.GradScaler"):
        Update(None, {}, grad_scaler=value)


def test_trainable_float16_parameters_under_a_scaler_are_refused() -> None:
    """Their gradients cannot be unscaled; frozen ones have none, and no scaler needs none."""
    half = parameter(None, torch.float16)
    frozen = nn.Parameter(half.detach(), requires_grad=False)
    Update(None, {3: [half]}, grad_scaler=scaler_of(enabled=False))
    Update(None, {3: [frozen]}, grad_scaler=scaler_of())
    told = r"^stage 3 has 1 trainable parameters in float16.*: keep them in float32.*autocast$"
    with pytest.raises(ValueError, match=told):
        Update(None, {3: [half, frozen]}, grad_scaler=scaler_of())


REPORT = GradientReport(((0, "float32", (1.0,)),), True, 8.0)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (GradientReport(None, True, 8.0), "max_grad_norm is given on rank 1 and None on rank 4"),
        (GradientReport((), True, 4.0), "the scale of grad_scaler is 8.0 on rank 1 and 4.0 on ra"),
        (GradientReport((), True, None), "the scale of grad_scaler is 8.0 on rank 1 and None on"),
    ],
)
def test_ranks_that_do_not_agree_are_named(other: GradientReport, told: str) -> None:
    """Both values and both ranks."""
    with pytest.raises(ProtocolError, match=f"^{told}.*: give every rank the same"):
        verdict({1: REPORT, 4: other})


def test_a_dtype_that_torch_has_not_is_refused() -> None:
    """Nothing else of torch's is taken for one."""
    for name in ("float31", "nn"):
        with pytest.raises(ProtocolError, match=f"of dtype '{name}', which torch .* has not"):
            verdict({0: GradientReport(((0, name, (1.0,)),), True, None)})


def test_copies_do_not_count_for_the_norm_and_do_for_what_is_finite() -> None:
    """Of four ranks in two replicas the first one's norms are summed up."""
    reports = {
        rank: GradientReport(((rank // 2, "float32", (3.0 + rank // 2,)),), rank != 3, None)
        for rank in range(4)
    }
    assert verdict(reports, counted={0, 2}) == Verdict(5.0, "float32", False)
    reports[3] = GradientReport(reports[3].norms, True, None)
    assert verdict(reports, counted={0, 2}) == Verdict(5.0, "float32", True)
    assert verdict(reports).grad_norm == pytest.approx(math.sqrt(50.0))


@pytest.mark.parametrize("value", [8.0, math.inf])
def test_a_scaler_that_two_ranks_share_is_found_out(value: float) -> None:
    """It would move twice a step, or not know of the second rank's."""
    scaler = scaler_of()
    updates = [Update(None, {stage: [parameter(value)]}, grad_scaler=scaler) for stage in (0, 1)]
    with pytest.raises(StateError, match=r"the GradScaler was updated between.*an object of its"):
        end(updates)

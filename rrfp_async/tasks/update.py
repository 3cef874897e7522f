"""What ends a training step on one rank: unscale, clip, step, and the next step's loss scale.

Every rank reports on its gradients (`Update.report`), one makes the `verdict` of all reports, and
every rank applies it (`Update.apply`). So gradients are clipped by one norm, and a step that one
rank must skip is skipped by all. How reports and verdict travel is not known here.

Norms are computed by torch's own functions, one for each gradient, and travel as floats, which hold
them exactly. Summed up in the order of stages and parameters, they give what
`torch.nn.utils.clip_grad_norm_` finds in the unpartitioned model, to the bit.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from itertools import groupby
from typing import Any, cast

import torch
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from rrfp_async.bus.messages import GradientReport, Norms, Verdict
from rrfp_async.errors import ProtocolError, StateError

_CPU = torch.device("cpu")
_SCALER_STATE = ("scale", "_growth_tracker")
_NOT_OURS = (
    "the GradScaler was updated between the end of a step's tasks and the end of the step: give "
    "every rank an object of its own, and leave its update() to the step"
)


def verdict(
    reports: Mapping[int, GradientReport],
    *,
    counted: Collection[int] | None = None,
    device: torch.device = _CPU,
) -> Verdict:
    """Judge a step by the reports of all ranks.

    Args:
        reports: Every rank's report.
        counted: The ranks whose norms are summed up, so that a stage appears in one of them; the
            others hold copies of their gradients, or shards of what they report in full. By
            default all.
        device: Where the norms are summed up. What is summed on another device than the
            unpartitioned model's may differ from it in the last bit.

    Raises:
        ProtocolError: If only some ranks clip or scale, or their scales differ.
    """
    _check_agreement(reports)
    finite = all(report.finite for report in reports.values())
    if any(report.norms is None for report in reports.values()):
        return Verdict(None, None, finite)
    those = reports if counted is None else counted
    norms = [run for rank in those for run in reports[rank].norms or ()]
    norms.sort(key=lambda run: run[0])  # by stage; stable, so parameters keep their order
    stand_ins = [
        norm
        for _, dtype, values in norms
        for norm in torch.tensor(values, dtype=_dtype(dtype), device=device).unbind()
    ]
    total = get_total_norm(stand_ins, foreach=False)  # the norm of one number is that number
    return Verdict(total.item(), _name(total.dtype), finite)


class Update:
    """The end of every training step on one rank: `report`, then `apply` with the verdict.

    Both run on the device's thread, between steps' tasks, once for each step that updates. All
    gradients of the rank's stages are unscaled and clipped, also those that its optimizer does not
    hold, so that what can be read after a step are the true ones.

    Args:
        optimizer: The rank's optimizer, or None: then gradients are left for the caller.
        parameters: The parameters of every stage of the rank, in order.
        device: Where the rank computes.
        max_grad_norm: The 2-norm that all ranks' gradients together are clipped to; equal on
            every rank.
        grad_scaler: The loss scale, in an object of this rank's own, with settings and state equal
            on every rank. One that is not enabled counts as None.
        not_counted: Ids (`id(parameter)`) of copies of weights that another stage counts: they are
            clipped, but left out of the norm.

    Raises:
        ValueError: If `max_grad_norm` is no positive number, `grad_scaler` none of torch's, or a
            parameter is one that it cannot unscale.

    Attributes:
        scale_used: What the losses of the last step that updated were multiplied by; None before
            it, or without a scaler.
    """

    def __init__(
        self,
        optimizer: Optimizer | None,
        parameters: Mapping[int, Sequence[Parameter]],
        *,
        device: torch.device = _CPU,
        max_grad_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        not_counted: Set[int] = frozenset(),
    ) -> None:
        _check_max_grad_norm(max_grad_norm)
        _check_grad_scaler(grad_scaler)
        self._optimizer = optimizer
        self._stages = {stage: list(held) for stage, held in parameters.items()}
        self._parameters = [each for of_stage in self._stages.values() for each in of_stage]
        self._device = device
        self._max_grad_norm = max_grad_norm
        self._scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        self._not_counted = not_counted
        self._everything = _StandIn(0.0, device, self._parameters)
        self._veto = _StandIn(math.inf, device)
        self._scale: float | None = None  # while a step is between its report and its verdict
        self.scale_used: float | None = None
        if self._scaler is not None:
            _check_not_half(self._stages)

    @property
    def scales(self) -> bool:
        """Whether there is a scaler that is enabled."""
        return self._scaler is not None

    def state(self) -> dict[str, float | int]:
        """What a checkpoint keeps of the scaler, as plain values; nothing without one."""
        if self._scaler is None:
            return {}
        held = self._scaler.state_dict()
        return {f"grad_scaler.{name}": held[name] for name in _SCALER_STATE}

    def restore(self, run: Mapping[str, Any]) -> None:
        """Take over what `state` gave, if anything; a scaler's settings stay this one's."""
        if self._scaler is None or f"grad_scaler.{_SCALER_STATE[0]}" not in run:
            return
        held = {name: run[f"grad_scaler.{name}"] for name in _SCALER_STATE}
        self._scaler.load_state_dict({**self._scaler.state_dict(), **held})

    def loss_scale(self) -> torch.Tensor | None:
        """What the last stage multiplies a microbatch's loss by before its backward.

        Returns:
            A tensor `()`, float32, on the rank's device, the same until `apply`; None without a
            scaler.
        """
        if self._scaler is None:
            return None
        return self._scaler.scale(torch.ones((), device=self._device))

    def report(self) -> GradientReport:
        """Unscale the rank's gradients, and say what is to be known of them."""
        finite = self._unscale()
        norms = None if self._max_grad_norm is None else tuple(self._norms())
        return GradientReport(norms, finite, self._scale)

    def apply(self, verdict: Verdict) -> None:
        """Clip the gradients and step the optimizer, or skip both; then move the scale.

        Without a scaler, a norm that is not finite clips as `clip_grad_norm_` does by default.

        Raises:
            StateError: If the scaler was updated by someone else since `report`.
        """
        if verdict.finite:
            self._clip(verdict)
            if self._optimizer is not None:
                self._optimizer.step()
        self._move_scale(finite=verdict.finite)

    def _unscale(self) -> bool:
        """Divide all gradients by the scale; whether none has an inf or NaN."""
        if self._scaler is None:
            return True
        self.loss_scale()  # a scaler has no scale until it has scaled
        self._scale = self.scale_used = self._scaler.get_scale()
        self._everything.stepped = False
        self._scaler.step(self._everything.as_optimizer())
        return self._everything.stepped

    def _norms(self) -> Iterable[Norms]:
        """The norms of the gradients that count, in runs of one dtype."""
        for stage, parameters in self._stages.items():
            counted = (each for each in parameters if id(each) not in self._not_counted)
            gradients = (each.grad for each in counted if each.grad is not None)
            for dtype, run in groupby(gradients, lambda gradient: gradient.dtype):
                yield stage, _name(dtype), _norms_of(list(run))

    def _clip(self, verdict: Verdict) -> None:
        if self._max_grad_norm is None or verdict.grad_norm is None or verdict.dtype is None:
            return
        total = torch.tensor(verdict.grad_norm, dtype=_dtype(verdict.dtype), device=self._device)
        plain = [each for each in self._parameters if not hasattr(each, "to_local")]
        clip_grads_with_norm_(plain, self._max_grad_norm, total)
        shards = [each for each in self._parameters if hasattr(each, "to_local")]
        if shards:  # DTensors: torch takes no plain norm for many of them at once
            clip_grads_with_norm_(shards, self._max_grad_norm, total, foreach=False)

    def _move_scale(self, *, finite: bool) -> None:
        """Let the scale grow or back off by what all ranks found."""
        if self._scaler is None:
            return
        if self._scaler.get_scale() != self._scale:
            raise StateError(_NOT_OURS)
        if not finite:
            self._scaler.unscale_(self._veto.as_optimizer())
        try:
            self._scaler.update()
        except AssertionError as error:  # nothing is left of what `report` noted there
            raise StateError(_NOT_OURS) from error
        self._scale = None


class _StandIn:
    """To a scaler, an optimizer over `parameters` and one gradient of its own.

    A scaler tells whether it found an inf or NaN by stepping its optimizer or not, and it wants a
    gradient to look at. So this one says what was found without updating anything, on a rank
    without gradients or an optimizer too, and makes the scaler note an inf that another rank found.

    Attributes:
        stepped: Whether the scaler let it step.
    """

    def __init__(
        self, gradient: float, device: torch.device, parameters: Iterable[Parameter] = ()
    ) -> None:
        own = Parameter(torch.zeros((), device=device))
        own.grad = torch.full_like(own, gradient)
        held = [*parameters, own]  # own last: among DTensors, torch asks the first for the mesh
        self.param_groups: list[dict[str, Any]] = [{"params": held}]
        self.stepped = False

    def step(self) -> None:
        """Note that the scaler found all gradients finite."""
        self.stepped = True

    def as_optimizer(self) -> Optimizer:
        """Itself: a scaler asks no more of an optimizer. A real one would run global hooks."""
        return cast(Optimizer, self)


def _norms_of(gradients: list[torch.Tensor]) -> tuple[float, ...]:
    """Their 2-norms, found as torch does on the way to a total one, in the gradients' dtype.

    The function for many has no public name, and costs a twentieth of one call for each. torch
    leaves it, as here, where one is no plain tensor.
    """
    if all(type(gradient) is torch.Tensor for gradient in gradients):
        norms = torch._foreach_norm(gradients)
    else:
        norms = tuple(_summed_up(get_total_norm((gradient,))) for gradient in gradients)
    return tuple(torch.stack(norms).tolist())


def _summed_up(norm: torch.Tensor) -> torch.Tensor:
    """A DTensor's norm is one of this rank's shard until it is summed over the mesh."""
    sum_up = getattr(norm, "full_tensor", None)
    return norm if sum_up is None else cast(torch.Tensor, sum_up())


def _check_max_grad_norm(value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(
            f"max_grad_norm={value!r} must be a finite number above 0, or None for no clipping: "
            f"give max_grad_norm=1.0"
        )


def _check_grad_scaler(value: object) -> None:
    if value is not None and not isinstance(value, torch.amp.GradScaler):
        raise ValueError(
            f"grad_scaler of type {type(value).__name__} must be a torch.amp.GradScaler or None: "
            f"give every rank its own torch.amp.GradScaler(device)"
        )


def _check_not_half(stages: Mapping[int, Sequence[Parameter]]) -> None:
    for stage, parameters in stages.items():
        half = sum(each.requires_grad and each.dtype == torch.float16 for each in parameters)
        if half:
            raise ValueError(
                f"stage {stage} has {half} trainable parameters in float16, whose gradients a "
                f"GradScaler cannot unscale: keep them in float32 and compute in float16 under "
                f"torch.autocast"
            )


def _check_agreement(reports: Mapping[int, GradientReport]) -> None:
    """Refuse reports of ranks that do not clip alike, or whose loss scales differ."""
    first, *others = reports
    for name, told in (
        ("max_grad_norm", {rank: _given(report.norms) for rank, report in reports.items()}),
        ("the scale of grad_scaler", {rank: report.scale for rank, report in reports.items()}),
    ):
        for rank in others:
            if told[rank] != told[first]:
                raise ProtocolError(
                    f"{name} is {told[first]} on rank {first} and {told[rank]} on rank {rank}: "
                    f"give every rank the same max_grad_norm, and a GradScaler of the same "
                    f"settings and state"
                )


def _given(norms: object) -> str:
    return "None" if norms is None else "given"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(
            f"a rank reports gradients of dtype {name!r}, which torch {torch.__version__} has not: "
            f"run the same torch on every rank"
        )
    return dtype

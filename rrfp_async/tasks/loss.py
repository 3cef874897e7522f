"""The loss of a batch from the losses of its microbatches, in whatever order those are computed.

A microbatch's share of the batch is known before its backward begins, so each backward starts from
a loss that is weighted already. It does not know where outputs come from.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

LossFn = Callable[[Any, Any], Any]
Count = Callable[[Any], Any]
Reduction = Literal["mean", "sum"] | Count

_HALVES = (torch.float16, torch.bfloat16)


class TokenMean:
    """Count the tokens of a target that are not ignored; as `loss_reduction=` it weights by them.

    Args:
        ignore_index: The target's value that a loss function leaves out.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index

    def __call__(self, target: torch.Tensor) -> torch.Tensor:
        """The number of tokens, a tensor without dimensions on the target's device."""
        return (target != self.ignore_index).sum()


def check_reduction(reduction: Any) -> None:
    """Refuse what is no reduction.

    Raises:
        ValueError: If it is none.
    """
    if reduction not in ("mean", "sum") and not callable(reduction):
        raise ValueError(
            f"loss_reduction={reduction!r} must be 'mean', 'sum', or a function that counts what "
            f"loss_fn averages over in a microbatch's target, such as TokenMean()"
        )


class Loss:
    """A loss function over the microbatches of one step after another."""

    def __init__(self, function: LossFn, reduction: Reduction = "mean") -> None:
        self._function = function
        self._reduction = reduction
        self._scale_of: Callable[[], torch.Tensor | None] = _unscaled
        self.begin_step((), ())

    def scale_by(self, scale: Callable[[], torch.Tensor | None]) -> None:
        """From now on multiply every loss before its backward by what `scale` returns."""
        self._scale_of = scale

    def begin_step(self, targets: Sequence[Any], sizes: Sequence[int]) -> None:
        """Start a step.

        Args:
            targets: One per microbatch; none for a step without a loss.
            sizes: Samples per microbatch.
        """
        self._targets = targets
        self._counts: Sequence[float] = () if callable(self._reduction) else sizes
        self._all: float = sum(self._counts)
        self._losses: dict[int, torch.Tensor] = {}

    def __bool__(self) -> bool:
        """Whether the step has a loss."""
        return bool(self._targets)

    def root(self, microbatch: int, output: Any) -> torch.Tensor | None:
        """The microbatch's part of the batch's loss, to start its backward from.

        The loss function gets floating tensors of half precision in full. None where the
        microbatch counts for nothing: there its loss is 0, whatever the function says.

        Raises:
            TypeError: If the function's result is no scalar tensor.
            ValueError: If a count is negative or no number.
        """
        loss = self._function(_in_full(output), self._targets[microbatch])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            seen = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TypeError(f"loss_fn returned {seen}, not a scalar tensor: reduce it to one value")
        loss = loss.float() if loss.dtype in _HALVES else loss
        weight = self._weight(microbatch)
        if weight == 0:
            self._losses[microbatch] = torch.zeros_like(loss, requires_grad=False)
            return None
        self._losses[microbatch] = loss.detach()
        weighted = loss if self._reduction == "sum" else loss * weight
        scale = self._scale_of()
        return weighted if scale is None else weighted * scale

    def losses(self) -> list[float]:
        """What the function said of each microbatch, in their order; reads the device."""
        return [float(self._losses[microbatch]) for microbatch in sorted(self._losses)]

    def total(self, losses: Sequence[float]) -> float | None:
        """The batch's loss from its microbatches', in their order; None without a target."""
        if not losses:
            return None
        weighted = (loss * self._weight(microbatch) for microbatch, loss in enumerate(losses))
        return sum(weighted, start=0.0)

    def _weight(self, microbatch: int) -> float:
        if self._reduction == "sum":
            return 1.0
        if callable(self._reduction) and not self._counts:
            self._counts = [_checked(self._reduction, target) for target in self._targets]
            self._all = sum(self._counts)
        return self._counts[microbatch] / self._all if self._all else 0.0


def _unscaled() -> None:
    """Without a scaler."""


def _checked(count: Count, target: Any) -> float:
    seen = float(count(target))
    if not 0 <= seen < float("inf"):
        raise ValueError(
            f"loss_reduction counted {seen} in a microbatch's target: return how many elements "
            f"loss_fn averages over, 0 or more"
        )
    return seen


def _in_full(output: Any) -> Any:
    """The output with half-precision tensors as float32: a loss has few bits to lose."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.float() if t.dtype in _HALVES else t, output
    )

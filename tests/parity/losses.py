"""The loss of a language model, and what a microbatch of it counts in a batch."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

import rrfp_async as r
from tests.parity.batches import IGNORED

COUNTS: dict[str, Any] = {"mean": None, "tokens": r.TokenMean(IGNORED), "sum": "sum"}
"""By name of a loss: the Runtime's `loss_reduction`, None for its default."""


@dataclass(frozen=True)
class CrossEntropy:
    """Of logits `(batch, length, words)` and targets `(batch, length)`.

    Attributes:
        reduction: "mean" or "sum" over the tokens that are not ignored.
        time_major: Whether targets are `(length, batch)`.
    """

    reduction: str = "mean"
    time_major: bool = False

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        target = target.t() if self.time_major else target
        return functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction=self.reduction
        )

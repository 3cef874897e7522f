"""What a step is asked to be, and what it came to, on one rank."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rrfp_async.tasks.batch import Batch


@dataclass(frozen=True, slots=True)
class StepRequest:
    """What the Runtime asks for.

    Attributes:
        training: The step's mode.
        zero_gradients: Whether the first accumulation starts from nothing.
        batch: Gets this rank's part of the batch; may wait for data.
    """

    training: bool
    zero_gradients: bool
    batch: Callable[[], Awaitable[Batch]]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step came to on this rank. Times in seconds; see `runtime.StepResult`."""

    step: int
    loss: float | None
    losses: list[float]
    outputs: list[Any]
    compute_s: float
    blocking_s: float
    coordination_s: float
    peak_in_flight: int


def weighted(losses: Sequence[float], sizes: Sequence[int]) -> float | None:
    """The batch's loss: each microbatch's, weighted by its share of the samples, in order."""
    if not losses:
        return None
    total = sum(sizes)
    return sum((loss * (size / total) for loss, size in zip(losses, sizes, strict=True)), start=0.0)

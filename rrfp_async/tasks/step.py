"""What a step is asked to be, and what it came to, on one rank."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rrfp_async.bus.messages import GradientReport, StepBegin, Verdict
from rrfp_async.tasks.batch import Arguments, Batch
from rrfp_async.tasks.stage import Stage, StageInputs
from rrfp_async.tp.agreement import AgreementReport


@dataclass(frozen=True, slots=True)
class StepRequest:
    """What the Runtime asks for.

    Attributes:
        training: The step's mode.
        update: Whether it ends in an update.
        number: Among the steps of its mode, from 0.
        seed: Of what is drawn in it; the first rank's counts.
        zero_gradients: Whether the first accumulation starts from nothing.
        batch: Gets this rank's part of the batch; may wait for data.
        report: Says on the device what other ranks must know of this one's gradients; None if
            nothing.
    """

    training: bool
    update: bool
    number: int
    seed: int
    zero_gradients: bool
    batch: Callable[[], Awaitable[Batch]]
    report: Callable[[], GradientReport] | None = None


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What one rank did until its tasks were done, in seconds; see `StepResult`."""

    compute_s: float
    blocking_s: float
    coordination_s: float


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
    verdict: Verdict | None
    agreement: AgreementReport | None = None
    ranks: tuple[RankTimes, ...] = ()


def stage_inputs(
    stage: Stage,
    request: StepRequest,
    batch: Batch,
    arguments: list[Arguments],
    begin: StepBegin,
) -> StageInputs:
    """What `stage` gets of a step; outputs are kept in evaluation.

    Args:
        stage: Whose part it is.
        request: The step.
        batch: This rank's part of the batch.
        arguments: The source stages' arguments, per microbatch.
        begin: The step as it was announced.
    """
    has_target = stage.is_last and batch.target is not None
    return StageInputs(
        training=request.training,
        zero_gradients=request.zero_gradients,
        sizes=begin.sizes,
        number=request.number,
        seed=begin.seed,
        arguments=arguments if stage.is_source else [],
        targets=batch.split_target(begin.sizes) if has_target else [],
        keep_outputs=not request.training,
    )


def check_sizes(own: tuple[int, ...] | None, sizes: tuple[int, ...], *, called: str) -> None:
    """Refuse a batch that is not of the step's `sizes`.

    Args:
        own: The samples of each microbatch that this rank was given; None if it takes no inputs.
        sizes: The first rank's.
        called: This rank.

    Raises:
        ValueError: Naming both.
    """
    if own is not None and own != sizes:
        raise ValueError(
            f"{called} was given microbatches of {list(own)} samples, rank 0 of {list(sizes)}: "
            f"give as many on every rank that takes inputs"
        )


def most_kept(stages: Iterable[Stage]) -> int | None:
    """The bytes that the heaviest of `stages` keeps; None until every one was measured."""
    most = 0
    for stage in stages:
        if stage.kept_bytes is None:
            return None
        most = max(most, stage.kept_bytes)
    return most

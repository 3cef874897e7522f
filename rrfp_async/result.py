"""What a step came to, as the user sees it."""

from dataclasses import dataclass
from typing import Any

from rrfp_async.tasks.step import RankTimes, StepReport
from rrfp_async.tp.agreement import AgreementReport


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to, seen from one rank.

    Attributes:
        loss: The batch's loss, put together from `losses` as `loss_reduction` says; the same
            float on every rank. None after an evaluation without a target.
        losses: The loss of each microbatch, on the rank of the last stage; else empty.
        outputs: The last stage's output for each microbatch, detached, on its device, on the rank
            of the last stage; else empty.
        grad_norm: The norm of all ranks' gradients before they were clipped, as the same float on
            every rank; None without `max_grad_norm`, an update, or training.
        skipped: Whether the update was left out on every rank, for a gradient that was not finite
            under the `grad_scaler`.
        step_s: Seconds that the step took on this rank. The next four sum to it.
        compute_s: Tasks held the device.
        blocking_s: The device was idle because no task was ready and admissible, or because this
            rank was done and others were not.
        coordination_s: Spent on agreeing with the other ranks what the step is, and with those of
            a tensor-parallel group on every task.
        other_s: The rest: dispatching, hand-offs between threads, splitting, the optimizer.
        peak_in_flight: Most forwards at once whose gradient was not yet accumulated.
        agreement: What agreeing on tasks came to; None where a rank computes its stages alone.
        ranks: What every rank did until its tasks were done, on rank 0; elsewhere empty.
    """

    loss: float | None
    losses: list[float]
    outputs: list[Any]
    grad_norm: float | None
    skipped: bool
    step_s: float
    compute_s: float
    blocking_s: float
    coordination_s: float
    other_s: float
    peak_in_flight: int
    agreement: AgreementReport | None = None
    ranks: tuple[RankTimes, ...] = ()


def result_of(report: StepReport, step_s: float) -> StepResult:
    """The result of a step of `step_s` seconds from the dispatcher's report."""
    spent = (report.compute_s, report.blocking_s, report.coordination_s)
    verdict = report.verdict
    return StepResult(
        report.loss,
        report.losses,
        report.outputs,
        None if verdict is None else verdict.grad_norm,
        verdict is not None and not verdict.finite,
        step_s,
        *spent,
        step_s - sum(spent),
        report.peak_in_flight,
        report.agreement,
        report.ranks,
    )

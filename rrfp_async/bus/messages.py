"""What ranks say to one another: frozen values of ints, strings and short lists.

Most carry their step. How it becomes bytes is `codec`'s business, who reacts
to it the dispatcher's.
"""

from dataclasses import dataclass

from rrfp_async.ids import TENSORS_ONLY, Edge, Layout, Link, TaskId, TensorSpec


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank is there, with these settings; to the first rank, before its first step."""

    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class StepBegin:
    """The first rank announces a step.

    Attributes:
        step: Its number.
        training: Its mode.
        update: Whether it ends in an update.
        seed: Of all that is drawn in it.
        sizes: The samples of each microbatch.
    """

    step: int
    training: bool
    update: bool
    seed: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """A tensor group is ready to be sent, or here if it is small.

    Attributes:
        step: The step it belongs to.
        link: From rank, to rank.
        sequence: Its number among the transfers of that link, from 0, over all steps.
        edge: The stage edge; activations run along it, gradients against it.
        task: The task that made it: a forward's result is an activation, else a gradient.
        specs: One spec per tensor; None where a gradient does not exist.
        payload: The tensors' bytes, one after another; None if they follow as a transfer.
        layout: What arguments an activation's tensors are part of.
    """

    step: int
    link: Link
    sequence: int
    edge: Edge
    task: TaskId
    specs: tuple[TensorSpec | None, ...]
    payload: bytes | None = None
    layout: Layout = TENSORS_ONLY


Norms = tuple[int, str, tuple[float, ...]]
"""A stage, a dtype ("float32"), and the 2-norms of consecutive gradients of that dtype."""


@dataclass(frozen=True, slots=True)
class GradientReport:
    """What a rank's gradients look like when its tasks are done. Plain values, to be sent.

    Attributes:
        norms: The norms of the rank's counted gradients, unscaled, each stage's in the order of its
            parameters; None without a `max_grad_norm`.
        finite: Whether no inf or NaN was found while unscaling; True without a scaler.
        scale: What the loss was multiplied by; None without a scaler.
    """

    norms: tuple[Norms, ...] | None
    finite: bool
    scale: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the step ends, equal on every rank. Plain values, to be sent.

    Attributes:
        grad_norm: The 2-norm of all gradients before clipping; None without a `max_grad_norm`.
        dtype: That in which torch computed it ("float32"); None where it did not.
        finite: Whether the optimizers step; else all skip the step and the scale backs off.
    """

    grad_norm: float | None
    dtype: str | None
    finite: bool


Spent = tuple[float, float, float]
"""Seconds that a rank has computed, been blocked and coordinated in a step."""


@dataclass(frozen=True, slots=True)
class RankDone:
    """A rank has run all its tasks; the last stage's rank adds the loss.

    Attributes:
        step: The step.
        loss: The batch's.
        gradients: What is to be known of the rank's gradients; None if nothing is.
        spent_s: Seconds that the rank has computed, been blocked and coordinated in the step.
    """

    step: int
    loss: float | None
    gradients: GradientReport | None = None
    spent_s: Spent = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StepEnd:
    """Every rank has run all its tasks: the step counts.

    Attributes:
        step: The step.
        loss: The batch's.
        verdict: How every rank updates; None if as always.
    """

    step: int
    loss: float | None
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A step failed on a rank; everyone ends it with this cause. See `errors.StepFailed`."""

    step: int
    rank: int
    stage: int | None
    task: str | None
    microbatch: int | None
    cause: str
    records: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How many events a rank has seen in a step; to the first rank, from time to time.

    Attributes:
        step: The step.
        events: Arrivals, completions and transfers so far.
        report: What the rank has ready and waits for, if nothing has happened since the last one.
    """

    step: int
    events: int
    report: str


@dataclass(frozen=True, slots=True)
class Farewell:
    """A rank closed its Runtime; `steps` is how many it finished."""

    steps: int


@dataclass(frozen=True, slots=True)
class ClockAsk:
    """A rank asks the first one for its time, with a number to know the answer by."""

    number: int


@dataclass(frozen=True, slots=True)
class ClockTold:
    """The first rank's time, in seconds on its own clock, in answer to that question."""

    number: int
    time_s: float


@dataclass(frozen=True, slots=True)
class TpArrival:
    """A rank of a tensor-parallel group tells its leader what has come to it.

    Attributes:
        step: The step.
        edge: The stage edge that it came along, or as a gradient against.
        task: The task that made it: a forward, or B or I.
        time_s: When, in seconds on the first rank's clock.
    """

    step: int
    edge: Edge
    task: TaskId
    time_s: float


@dataclass(frozen=True, slots=True)
class TpDecision:
    """A leader tells its group the next task.

    Attributes:
        step: The step.
        number: Of the decision within the step, from 0.
        task: What every rank of the group runs next.
        ready_s: When the last rank had what it needs from other ranks, in seconds on the first
            rank's clock; 0.0 if it needs nothing from them.
    """

    step: int
    number: int
    task: TaskId
    ready_s: float


@dataclass(frozen=True, slots=True)
class TpProposal:
    """Where there is no leader, a rank tells its group what it would run next.

    Attributes:
        step: The step.
        round: All that are made in one are compared; from 0.
        task: Its choice.
        ready_s: When it had what that needs from other ranks, as in `TpDecision`.
    """

    step: int
    round: int
    task: TaskId
    ready_s: float


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection to a rank is gone. Made by the bus itself, never sent."""

    reason: str


Message = (
    Hello
    | StepBegin
    | Header
    | RankDone
    | StepEnd
    | Progress
    | Failure
    | Farewell
    | ClockAsk
    | ClockTold
    | TpArrival
    | TpDecision
    | TpProposal
    | PeerLost
)

AgreementMessage = TpArrival | TpDecision | TpProposal
"""What only the ranks of one tensor-parallel group say to one another."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with its sender and its number among that sender's messages to this rank."""

    source: int
    sequence: int
    message: Message

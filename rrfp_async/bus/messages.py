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
    """The first rank announces a step: its mode, whether it updates, each microbatch's samples."""

    step: int
    training: bool
    update: bool
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


@dataclass(frozen=True, slots=True)
class RankDone:
    """A rank has run all its tasks; the last stage's rank adds the loss."""

    step: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class StepEnd:
    """Every rank has run all its tasks: the step counts, and this is its loss."""

    step: int
    loss: float | None


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
class PeerLost:
    """The connection to a rank is gone. Made by the bus itself, never sent."""

    reason: str


Message = Hello | StepBegin | Header | RankDone | StepEnd | Progress | Failure | Farewell | PeerLost


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with its sender and its number among that sender's messages to this rank."""

    source: int
    sequence: int
    message: Message

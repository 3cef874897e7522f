"""What one line of a record file says, typed. Times are moved onto the clock of the whole run.

The fields are those of docs/trace.md. It does not know files, nor what is concluded from a line.
"""

from dataclasses import dataclass

from rrfp_async.ids import Edge, TaskId

NEWEST = 2
"""The newest version of the records that is known here."""


@dataclass(frozen=True, slots=True)
class RunLine:
    """The first line: who wrote the file.

    Attributes:
        rank: The rank, global.
        schema: Version of the records.
        world_size: How many ranks there were.
        stages: How many stages there were.
        owned: The stages of this rank.
        hint: Name of the hint order.
        limit: Forwards in flight, or "auto".
        clock_offset_s: Added to the file's times it gives rank 0's clock.
        clock_error_s: How far that may be wrong; None if it was not measured.
        simulated: Whether the times are virtual.
        tp: How many ranks compute a stage together; they are numbered one after another.
    """

    rank: int
    schema: int
    world_size: int
    stages: int
    owned: tuple[int, ...]
    hint: str
    limit: int | str
    clock_offset_s: float
    clock_error_s: float | None
    simulated: bool
    tp: int = 1


@dataclass(frozen=True, slots=True)
class StepBegan:
    """A step began on the rank."""

    step: int
    time_s: float
    training: bool


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step ended on the rank; the four parts of its time sum to `step_s`."""

    step: int
    time_s: float
    step_s: float
    compute_s: float
    blocking_s: float
    coordination_s: float
    other_s: float
    loss: float | None
    peak_in_flight: int


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A decision; `time_s` is None in records of schema 1."""

    step: int
    task: TaskId | None
    time_s: float | None
    hint_position: int | None
    ready: int
    passed_over: tuple[str, ...]
    reason: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class TaskSpan:
    """A task held the device."""

    step: int
    task: TaskId
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """How long it held the device."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class TransferSpan:
    """What a task made was on its way between two ranks, as one of them saw it.

    Attributes:
        step: The step.
        task: The task that made it.
        edge: The edge it went along; a gradient goes against it.
        sent: Whether the sender says so, else the receiver.
        peer: The other rank.
        size_bytes: Of all tensors.
        packed: Whether it came within its header; then start and end are one.
        start_s: When its header left or came.
        end_s: When the receiver had it.
    """

    step: int
    task: TaskId
    edge: Edge
    sent: bool
    peer: int
    size_bytes: int
    packed: bool
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """One task that was missing while the rank idled.

    Attributes:
        task: The task that could not run.
        wanted: What it lacked: activation, gradient or task.
        edge: The edge that brings it.
        source: The task that makes it, or None if a batch does.
        rank: The rank that makes it.
    """

    task: TaskId
    wanted: str
    edge: Edge | None
    source: TaskId | None
    rank: int | None


@dataclass(frozen=True, slots=True)
class IdleSpan:
    """The device had nothing to do, and why, as it was when that began.

    Attributes:
        step: The step.
        start_s: From when.
        end_s: Until when.
        cause: "nothing ready", "limit", "fixed order", "agreement" or "others".
        ready: Tasks that were ready and not admissible.
        in_flight: Forwards in flight.
        bound: How many there may be; None for no bound.
        waits: What was missing, the best-ranked first.
    """

    step: int
    start_s: float
    end_s: float
    cause: str
    ready: tuple[TaskId, ...]
    in_flight: int
    bound: int | None
    waits: tuple[Wait, ...]

    @property
    def duration_s(self) -> float:
        """How long it was."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Voided:
    """A backward that did not run, because nothing wanted its gradient."""

    step: int
    task: TaskId


@dataclass(frozen=True, slots=True)
class Agreed:
    """A decision of a tensor-parallel group, and how long this rank waited for it."""

    step: int
    number: int
    task: TaskId | None
    leader: int | None
    wait_s: float
    retries: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The step failed; rank, stage and task are those of the first cause, wherever it arose."""

    step: int
    time_s: float
    rank: int | None
    task: TaskId | None
    cause: str
    report: str


@dataclass(frozen=True, slots=True)
class Lost:
    """So many records of this rank never reached the file."""

    records: int


Line = (
    RunLine
    | StepBegan
    | StepEnded
    | Dispatched
    | TaskSpan
    | TransferSpan
    | IdleSpan
    | Voided
    | Agreed
    | Failed
    | Lost
)

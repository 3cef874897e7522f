"""The typed, versioned records of a run. One class per kind of event.

Records are plain values: where they go is the writer's business. docs/trace.md shows them all.
Those of every task are not frozen, which would make each of them six times as dear to build.
Times are seconds on the clock of the rank that wrote them; its `RunRecord` says how far that is
from rank 0's.
"""

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from rrfp_async.arbiter import Decision
from rrfp_async.ids import Edge, TaskId

SCHEMA = 2
"""Version of the record format; raised when a field changes its meaning or leaves."""


class Direction(enum.Enum):
    """Which end of a transfer wrote the record."""

    SEND = "send"
    RECEIVE = "receive"


class Cause(enum.Enum):
    """Why a rank's device had nothing to do."""

    NOTHING_READY = "nothing ready"
    LIMIT = "limit"
    FIXED_ORDER = "fixed order"
    AGREEMENT = "agreement"
    OTHERS = "others"


class Lack(enum.Enum):
    """What a task waited for: a tensor over an edge, or a task of its own rank."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    TASK = "task"


class Wait(NamedTuple):
    """One thing that was missing while a rank was idle.

    Attributes:
        task: What could not run for lack of it.
        lack: What it was.
        edge: The edge that brings it; None for a task.
        of: The task that makes it.
        rank: The rank that runs that.
    """

    task: TaskId
    lack: Lack
    edge: Edge | None
    of: TaskId
    rank: int


def in_json(value: float) -> float | str:
    """To the nanosecond; JSON has no word for what is no finite number, so that is a string."""
    if math.isfinite(value):
        return round(value, 9)
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _several(values: tuple[Any, ...]) -> list[Any]:
    return [_plain(value) for value in values]


_PLAIN: Mapping[type, Callable[[Any], Any]] = MappingProxyType(
    {
        float: in_json,
        tuple: _several,
        TaskId: str,
        Edge: lambda edge: [edge.source, edge.target],
        Direction: lambda direction: direction.value,
        Cause: lambda cause: cause.value,
        Wait: lambda wait: {
            "task": str(wait.task),
            "for": wait.lack.value,
            "edge": _plain(wait.edge),
            "of": str(wait.of),
            "rank": wait.rank,
        },
    }
)


def _plain(value: Any) -> Any:
    make = _PLAIN.get(type(value))
    return value if make is None else make(value)


class Record:
    """A line of the log; its kinds are dataclasses.

    Attributes:
        EVENT: What a line of this kind is called.
    """

    __slots__ = ()

    EVENT: ClassVar[str]
    __match_args__: ClassVar[tuple[str, ...]]  # the fields' names, which a dataclass puts there

    def fields(self) -> dict[str, object]:
        """The record as JSON-able fields; tasks are words such as `2F5`, edges pairs of stages."""
        return {name: _plain(getattr(self, name)) for name in self.__match_args__}


@dataclass(frozen=True, slots=True)
class RunRecord(Record):
    """What runs, and how this rank's clock relates to rank 0's. The first line.

    Attributes:
        schema: `SCHEMA`.
        rank: Who writes.
        pp: Ranks along the pipeline.
        dp: Replicas of it.
        tp: Ranks that compute a stage together.
        stages: How many stages there are.
        owners: For each stage, its owner's place along the pipeline.
        owned: The stages of this rank.
        edges: The stage graph.
        hint: The hint order's name.
        limit: As configured.
        microbatches: As configured; a step may have its own number.
        host: The machine.
        pid: The process.
        clock_offset_s: To be added to this rank's times to get rank 0's.
        clock_error_s: How far off that is at most; None if the run failed before it was measured.
        simulated: Whether time is virtual.
        version: Of rrfp_async.
    """

    EVENT: ClassVar[str] = "run"

    schema: int
    rank: int
    pp: int
    dp: int
    tp: int
    stages: int
    owners: tuple[int, ...]
    owned: tuple[int, ...]
    edges: tuple[Edge, ...]
    hint: str
    limit: int | str
    microbatches: int
    host: str
    pid: int
    clock_offset_s: float
    clock_error_s: float | None
    simulated: bool
    version: str


@dataclass(frozen=True, slots=True)
class StepBeginRecord(Record):
    """A step begins.

    Attributes:
        step: Its number, from 0.
        time_s: When the caller asked for it.
        training: Its mode.
        update: Whether it ends in an update.
        sizes: The samples of each microbatch.
    """

    EVENT: ClassVar[str] = "step_begin"

    step: int
    time_s: float
    training: bool
    update: bool
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepEndRecord(Record):
    """A step has ended well; see `StepResult`, whose numbers these are.

    Attributes:
        step: Its number.
        time_s: When; `step_s` after its beginning.
        step_s: How long it took. The next four sum to it.
        compute_s: Tasks held the device.
        blocking_s: The device had nothing to do.
        coordination_s: The ranks agreed on the step.
        other_s: The rest.
        loss: The batch's, or None.
        peak_in_flight: The most forwards at once.
    """

    EVENT: ClassVar[str] = "step_end"

    step: int
    time_s: float
    step_s: float
    compute_s: float
    blocking_s: float
    coordination_s: float
    other_s: float
    loss: float | None
    peak_in_flight: int


@dataclass(slots=True)
class DispatchRecord(Record):
    """One dispatch decision.

    Attributes:
        step: The step's number, from 0.
        rank: The rank that decided.
        decision: What it chose and why.
        waited_s: Seconds the device had been idle when the choice was made.
        time_s: When the choice could no longer change.
    """

    EVENT: ClassVar[str] = "dispatch"

    step: int
    rank: int
    decision: Decision
    waited_s: float
    time_s: float

    def fields(self) -> dict[str, object]:
        """The record as JSON-able fields."""
        decision = self.decision
        return {
            "schema": SCHEMA,
            "step": self.step,
            "rank": self.rank,
            "stage": decision.task.stage if decision.task else None,
            "task": str(decision.task) if decision.task else None,
            "hint_position": decision.hint_position,
            "ready": decision.ready,
            "passed_over": [str(task) for task in decision.passed_over],
            "reason": decision.reason.value,
            "waited_s": in_json(self.waited_s),
            "time_s": in_json(self.time_s),
        }


@dataclass(slots=True)
class TaskRecord(Record):
    """A task held the device, from `start_s` to `end_s`; reductions run beside and have none."""

    EVENT: ClassVar[str] = "task"

    step: int
    task: TaskId
    start_s: float
    end_s: float


@dataclass(slots=True)
class TransferRecord(Record):
    """One end of a transfer.

    Attributes:
        step: The step's number.
        task: What made the tensors.
        edge: Activations go along it, gradients against it.
        direction: Which end this is.
        peer: The rank at the other end.
        bytes: The tensors'; 0 where only "no gradient" was told.
        packed: Whether they came with their header.
        start_s: The header was sent, or was here.
        end_s: The receiver has them.
    """

    EVENT: ClassVar[str] = "transfer"

    step: int
    task: TaskId
    edge: Edge
    direction: Direction
    peer: int
    bytes: int
    packed: bool
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class IdleRecord(Record):
    """The device had nothing to do, and why, as it was at the beginning.

    Attributes:
        step: The step's number.
        start_s: From then,
        end_s: until then.
        cause: Why, in a word.
        ready: The first of the tasks that were ready and held back.
        in_flight: What counts against the bound: forwards in flight, in evaluation open sends.
        bound: What those may not exceed.
        waits: What was missing, for the best-ranked tasks first.
    """

    EVENT: ClassVar[str] = "idle"

    step: int
    start_s: float
    end_s: float
    cause: Cause
    ready: tuple[TaskId, ...]
    in_flight: int
    bound: int
    waits: tuple[Wait, ...]


@dataclass(frozen=True, slots=True)
class VoidRecord(Record):
    """A backward that will not run: for its microbatch, nothing there or below has a gradient."""

    EVENT: ClassVar[str] = "void"

    step: int
    rank: int
    task: TaskId

    def fields(self) -> dict[str, object]:
        """The record as JSON-able fields."""
        return {
            "schema": SCHEMA,
            "step": self.step,
            "rank": self.rank,
            "stage": self.task.stage,
            "task": str(self.task),
        }


@dataclass(frozen=True, slots=True)
class AgreementRecord(Record):
    """The ranks that compute a stage together agreed on a task.

    Attributes:
        step: The step's number.
        number: Of the decision, within the step.
        task: What they decided on.
        leader: The rank that decided; None where all did.
        wait_s: How long this rank waited for it.
        retries: How often they had to try again.
    """

    EVENT: ClassVar[str] = "tp"

    step: int
    number: int
    task: TaskId
    leader: int | None
    wait_s: float
    retries: int


@dataclass(frozen=True, slots=True)
class FailureRecord(Record):
    """The step failed. The last line of a failed run; fields as in `errors.StepFailed`.

    Attributes:
        step: The step's number.
        time_s: When this rank knew.
        rank: Where the cause arose.
        stage: The failed task's, or None.
        task: Its word, or None.
        microbatch: Its microbatch, or None.
        cause: The exception as `Type: message`.
        report: What this rank had ready and waited for then; None outside a step.
    """

    EVENT: ClassVar[str] = "failure"

    step: int
    time_s: float
    rank: int
    stage: int | None
    task: str | None
    microbatch: int | None
    cause: str
    report: str | None


@dataclass(frozen=True, slots=True)
class LostRecord(Record):
    """So many records could not be written. The last line, if it could be."""

    EVENT: ClassVar[str] = "lost"

    records: int

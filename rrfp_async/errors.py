"""The exceptions of rrfp_async, drawn as one tree.

    RrfpError
    ├── StateError        a call that the Runtime's state does not allow (closed, failed, busy)
    ├── StepFailed        a step ended early on some rank; every rank raises it with the first cause
    ├── DataExhausted     `data=` has no further batch
    ├── ProtocolError     an event the decision core or the dispatcher has no place for
    ├── BusError          the control plane lost, doubled or cannot take a message
    │   └── CodecError    a frame that is no message
    ├── TransferError     a tensor did not arrive as its header announced it
    └── CheckpointError   a save or load failed on some rank; every rank raises it with the cause

Bad arguments are a plain `ValueError`. This file knows no other room.
"""


class RrfpError(Exception):
    """Base of everything rrfp_async raises, bad arguments (`ValueError`) apart."""


class StateError(RrfpError):
    """A call that does not fit the state of a Runtime or a resource."""


class DataExhausted(RrfpError):
    """The `data=` iterator ended before the training loop did."""


class ProtocolError(RrfpError):
    """An event that cannot happen in a correct run, such as an arrival that came twice."""


class BusError(RrfpError):
    """The control plane is not reliable any more: a gap, a repeat, an overflow, a closed end."""


class CodecError(BusError):
    """Bytes that do not decode to a message of this version."""


class TransferError(RrfpError):
    """A tensor whose shape or dtype differs from its header, or a transfer cut short."""


class CheckpointError(RrfpError):
    """A save or load that failed on every rank: no access, a damaged file, a rank that is lost."""


class StepFailed(RrfpError):
    """A step ended on every rank because of one first cause.

    Attributes:
        rank: The rank where the cause arose.
        step: The step's number, from 0.
        stage: The stage of the failed task, or None outside a task.
        task: The failed task as a word (`"2F5"`), or None outside a task.
        microbatch: The microbatch of the failed task, or None outside a task.
        cause: The original exception as `Type: message`. On the rank where it arose the exception
            itself is `__cause__`.
        records: The last things that happened to the task on that rank, oldest first.
    """

    def __init__(
        self,
        *,
        rank: int,
        step: int,
        cause: str,
        stage: int | None = None,
        task: str | None = None,
        microbatch: int | None = None,
        records: tuple[str, ...] = (),
    ) -> None:
        self.rank = rank
        self.step = step
        self.stage = stage
        self.task = task
        self.microbatch = microbatch
        self.cause = cause
        self.records = records
        where = f"rank {rank}"
        if task is not None:
            where += f", stage {stage}, task {task}, microbatch {microbatch}"
        told = "".join(f"\n    {record}" for record in records)
        super().__init__(f"step {step} failed on {where}: {cause}{told}")

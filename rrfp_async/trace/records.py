"""The typed, versioned records of a run. One class per kind of event.

Records are plain values: where they go is the writer's business.
"""

from dataclasses import dataclass
from typing import ClassVar

from rrfp_async.arbiter import Decision
from rrfp_async.ids import TaskId

SCHEMA = 1
"""Version of the record format; raised when a field changes its meaning or leaves."""


@dataclass(frozen=True, slots=True)
class DispatchRecord:
    """One dispatch decision.

    Attributes:
        EVENT: What a line of this kind is called.
        step: The step's number, from 0.
        rank: The rank that decided.
        decision: What it chose and why.
        waited_s: Seconds the device had been idle when the choice was made.
    """

    EVENT: ClassVar[str] = "dispatch"

    step: int
    rank: int
    decision: Decision
    waited_s: float

    def fields(self) -> dict[str, object]:
        """The record as JSON-able fields; tasks are words such as `2F5`."""
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
            "waited_s": round(self.waited_s, 9),
        }


@dataclass(frozen=True, slots=True)
class VoidRecord:
    """A backward that will not run: for its microbatch, nothing there or below has a gradient.

    Attributes:
        EVENT: What a line of this kind is called.
        step: The step's number, from 0.
        rank: The rank that would have run it.
        task: The task.
    """

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


Record = DispatchRecord | VoidRecord

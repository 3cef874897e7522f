"""The typed, versioned records of a run. One class per kind of event.

Records are plain values: where they go is the writer's business.
"""

from dataclasses import dataclass

from rrfp_async.arbiter import Decision

SCHEMA = 1
"""Version of the record format; raised when a field changes its meaning or leaves."""


@dataclass(frozen=True, slots=True)
class DispatchRecord:
    """One dispatch decision.

    Attributes:
        step: The step's number, from 0.
        rank: The rank that decided.
        decision: What it chose and why.
        waited_s: Seconds the device had been idle when the choice was made.
    """

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

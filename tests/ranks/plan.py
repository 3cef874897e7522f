"""What a worker is to do, as a value that travels on its command line."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong on one rank, and where.

    Attributes:
        rank: Whose fault it is.
        where: "forward", "backward", "loss" or "data" (raises there), "hang" (a forward that never
            ends), "absent" (comes to the step `after_s` late), "cancel" (its step is cancelled
            after `after_s`), "crash" (the process exits at once, in attempt 0 only), "raise" (the
            program raises between steps), "return" (it returns between steps), "late_start" and
            "late_step" (sleeps `after_s` before it opens its Runtime, or before step `step`),
            "no_route" (publishes an address that does not route).
        step: In which step.
        microbatch: Of which microbatch.
        after_s: Seconds, where the fault has a duration.
    """

    rank: int
    where: str
    step: int = 1
    microbatch: int = 2
    after_s: float = 3.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One Runtime's life on all ranks.

    Attributes:
        config: Settings beyond the microbatches, as `Config` takes them.
        config_of: Settings that differ, by rank (as a word).
        stages: Stages of the topology; 0 for one a rank.
        dp: Replicas; with several, give `stages`.
        steps: Steps to take.
        microbatches: Parts of a batch.
        width: Features of every tensor.
        rows: Samples in each microbatch.
        forward_s: Seconds that a stage sleeps in its forward.
        fault: What goes wrong.
        then: After the steps: "close", "twice" (closes twice), "leave" (returns without closing),
            "idle" (waits for ever), "again" (after a failure, tries one more step).
    """

    config: dict[str, Any] = field(default_factory=dict)
    config_of: dict[str, dict[str, Any]] = field(default_factory=dict)
    stages: int = 0
    dp: int = 1
    steps: int = 3
    microbatches: int = 4
    width: int = 8
    rows: int = 2
    forward_s: float = 0.0
    fault: Fault | None = None
    then: str = "close"

    def words(self) -> list[str]:
        """The worker's command line."""
        return [json.dumps(dataclasses.asdict(self))]

    @classmethod
    def parse(cls, word: str) -> Self:
        """Read one word of `words`."""
        fields = json.loads(word)
        fault = fields.pop("fault")
        return cls(fault=None if fault is None else Fault(**fault), **fields)

    def fault_at(self, rank: int, where: str, step: int | None = None) -> Fault | None:
        """The fault, if it is `where` on `rank` (and in `step`)."""
        fault = self.fault
        if fault is None or (fault.rank, fault.where) != (rank, where):
            return None
        return fault if step in (None, fault.step) else None

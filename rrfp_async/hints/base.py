"""What a hint order is: a ranking of the ready tasks of a rank. It ranks; it never makes it wait.

A hint order sees the tasks of a step by name only. It does not know what makes a task ready, why
one may not be dispatched now, or what a task does.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from rrfp_async.ids import TaskId, TaskKind


@dataclass(frozen=True, slots=True)
class Admissible:
    """Which ready tasks may be dispatched now. Call it with a task, or look inside.

    Everything but forwards is always admissible, so two fields say it all, and an order can find
    its best admissible task without trying them one by one.

    Attributes:
        any_forward: Whether every forward is admissible.
        forward_microbatch: Where not, the one microbatch whose forwards are, or None.
    """

    any_forward: bool
    forward_microbatch: int | None = None

    def __call__(self, task: TaskId) -> bool:
        """Whether `task` may be dispatched, given that it is ready."""
        return (
            self.any_forward
            or task.kind is not TaskKind.F
            or task.microbatch == self.forward_microbatch
        )


class HintOrder(ABC):
    """A ranking of ready tasks. State moves only on `commit`, so `peek` may be asked again.

    One instance serves one rank: the Runtime works on a copy of the object it is given.
    """

    @property
    def name(self) -> str:
        """What ranks compare to be sure they use the same order; the class's name.

        Override it where instances of the class differ, to tell them apart.
        """
        return type(self).__name__

    splits = False
    """Whether backwards are split into I (input gradient) and W (weight gradient)."""

    @property
    def fixed_peak(self) -> int | None:
        """The most forwards in flight in this step, for an order that is executed as it stands.

        None for the orders that only rank, which is what a hint order does unless it is a list
        under `binding=True`.
        """
        return None

    @abstractmethod
    def begin_step(self, tasks: Sequence[TaskId]) -> None:
        """Forget the last step; `tasks` are all that this rank will run in this one."""

    @abstractmethod
    def add(self, task: TaskId) -> None:
        """Note that `task`, one of the step's, has become ready."""

    @abstractmethod
    def peek(self, admissible: Admissible) -> TaskId | None:
        """The best ready task that is admissible, or None. Changes nothing."""

    @abstractmethod
    def commit(self, task: TaskId) -> None:
        """Note that `task` was dispatched; it is not ready any more."""

    def drop(self, task: TaskId) -> None:  # noqa: B027 - an order may not care
        """Note that `task`, one of the step's that is not ready, will not run.

        So it is with the backward of a microbatch for which nothing has a gradient.
        """

    def position(self, task: TaskId) -> int | None:  # noqa: ARG002 - a default
        """The task's place in the step's list, from 0, where the order is a list; else None."""
        return None

    def ahead_of(self, task: TaskId | None, most: int) -> list[TaskId]:  # noqa: ARG002 - a default
        """At most `most` tasks not yet dispatched that rank above `task` (above all, for None).

        With the task that `peek` chose, these are the ones that were not ready or not admissible.
        """
        return []

"""The choice: the hint order's first task among those that are ready and admissible.

Plain synchronous Python, events in and decisions out. It does not know how a task is run or
where a readiness event came from. Every choice can be explained from its `Decision`.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rrfp_async.backpressure import Backpressure
from rrfp_async.errors import ProtocolError
from rrfp_async.hints import HintOrder
from rrfp_async.ids import TaskId, TaskKind

PASSED_OVER_MOST = 8
"""How many passed-over tasks a decision lists at most."""


class Reason(enum.Enum):
    """Why a decision came out as it did."""

    FIRST = "first in the hint order"
    READY_FIRST = "higher-ranked tasks were not ready or not admissible"
    FIXED_ORDER = "the fixed order's next task is not ready"
    BACKPRESSURE = "every ready task is a forward held back by the limit"
    NOTHING_READY = "no task is ready"
    BESIDE = "it runs beside what computes"
    DECIDED = "the leader of the tensor-parallel group decided so"
    UNDECIDED = "the tensor-parallel group has not agreed on a task"


@dataclass(frozen=True, slots=True)
class Decision:
    """What the arbiter chose and why.

    Attributes:
        task: The task to run, or None if there is none that may be.
        hint_position: The task's place in the hint order's list; None for orders without one.
        ready: How many tasks were ready.
        passed_over: The first of the higher-ranked tasks that were not ready or not admissible.
        reason: The choice in a word.
    """

    task: TaskId | None
    hint_position: int | None
    ready: int
    passed_over: tuple[TaskId, ...]
    reason: Reason


class Arbiter:
    """Ranks one rank's ready tasks with a hint order, under backpressure."""

    def __init__(self, hint: HintOrder, backpressure: Backpressure) -> None:
        self._hint = hint
        self._backpressure = backpressure
        self._coming: set[TaskId] = set()
        self._ready: set[TaskId] = set()

    def begin_step(self, tasks: Sequence[TaskId]) -> None:
        """Start a step whose tasks on this rank are `tasks`; none of them is ready yet.

        Raises:
            ValueError: If the hint or the limit does not fit the step.
        """
        self._hint.begin_step(tasks)
        self._backpressure.begin_step(
            1 + max((task.microbatch for task in tasks), default=-1),
            backward=any(task.kind is not TaskKind.F for task in tasks),
            fixed_peak=self._hint.fixed_peak,
        )
        self._coming = set(tasks)
        self._ready.clear()

    def add(self, tasks: Iterable[TaskId]) -> None:
        """Note that `tasks` have become ready.

        Raises:
            ProtocolError: If one is not of this step, is ready already, or was dispatched.
        """
        for task in tasks:
            if task not in self._coming:
                raise ProtocolError(f"task {task} became ready, but is not one that is to come")
            self._coming.remove(task)
            self._ready.add(task)
            self._hint.add(task)

    def drop(self, task: TaskId) -> None:
        """Note that `task`, which is not ready, will not run; what it would free is free.

        Raises:
            ProtocolError: If it is not one that is to come.
        """
        if task not in self._coming:
            raise ProtocolError(f"task {task} is dropped, but is not one that is to come")
        self._coming.remove(task)
        self._hint.drop(task)
        self._backpressure.completed(task)

    @property
    def is_fixed(self) -> bool:
        """Whether the order is executed as it stands."""
        return self._hint.fixed_peak is not None

    @property
    def ready(self) -> frozenset[TaskId]:
        """The tasks that are ready and not dispatched."""
        return frozenset(self._ready)

    def wanted(self, most: int) -> list[TaskId]:
        """The first `most` of the hint order's tasks that were not dispatched, ready or not."""
        return self._hint.ahead_of(None, most)

    def choose(self) -> Decision:
        """The best ready and admissible task. Changes nothing, so it may be asked again."""
        ready = len(self._ready)
        if not ready:
            return Decision(None, None, 0, (), Reason.NOTHING_READY)
        task = self._hint.peek(self._backpressure.admissible())
        passed_over = tuple(self._hint.ahead_of(task, PASSED_OVER_MOST))
        if task is None:
            held_back = not self.is_fixed or self._ready.issuperset(passed_over)
            reason = Reason.BACKPRESSURE if held_back else Reason.FIXED_ORDER
            return Decision(None, None, ready, passed_over, reason)
        reason = Reason.READY_FIRST if passed_over else Reason.FIRST
        return Decision(task, self._hint.position(task), ready, passed_over, reason)

    def commit(self, decision: Decision) -> None:
        """Carry out a choice: the task is no longer ready, and a forward takes a place.

        Raises:
            ProtocolError: If the decision holds no task, or one that is not ready or not
                admissible (any more).
        """
        task = decision.task
        if task is None or task not in self._ready:
            raise ProtocolError(f"decision {decision} cannot be committed: its task is not ready")
        if not self._backpressure.admissible()(task):
            raise ProtocolError(f"decision {decision} cannot be committed: no room for its task")
        self._dispatch(task)

    def follow(self, task: TaskId) -> None:
        """Carry out what was decided elsewhere, where room was counted.

        Raises:
            ProtocolError: If the task is not ready.
        """
        if task not in self._ready:
            raise ProtocolError(f"task {task} was decided elsewhere, but is not ready here")
        self._dispatch(task)

    def _dispatch(self, task: TaskId) -> None:
        self._ready.remove(task)
        self._hint.commit(task)
        self._backpressure.decided(task)

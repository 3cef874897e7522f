"""Hint orders: how the ready tasks of a rank are ranked. They rank; they never make it wait.

A hint order sees the tasks of a step by name only. It does not know what makes a task ready, why
one may not be dispatched now, or what a task does. To write one, derive from `RankedHint`, give
`rank`, and pass an instance as `hint=`.
"""

import copy
import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

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

    def position(self, task: TaskId) -> int | None:  # noqa: ARG002 - a default
        """The task's place in the step's list, from 0, where the order is a list; else None."""
        return None

    def ahead_of(self, task: TaskId | None, most: int) -> list[TaskId]:  # noqa: ARG002 - a default
        """At most `most` tasks not yet dispatched that rank above `task` (above all, for None).

        With the task that `peek` chose, these are the ones that were not ready or not admissible.
        """
        return []


class RankedQueue:
    """A step's tasks in a fixed ranking: those not yet dispatched, and which of them are ready.

    Ready tasks lie in heaps of their positions, forwards apart from the rest, so that the best
    admissible one is found in O(log r). The tasks not yet dispatched form a linked list over the
    positions, so that "what ranks above this one" is a walk over live entries only.
    """

    def __init__(self, ranked: Sequence[TaskId]) -> None:
        self._tasks = tuple(ranked)
        self._position = {task: place for place, task in enumerate(self._tasks)}
        self._end = len(self._tasks)
        self._next = [*range(1, self._end + 1), 0]  # the slot at `end` is the list's head
        self._previous = [self._end, *range(self._end)]
        self._left = bytearray(self._end)
        self._forwards: list[int] = []
        self._others: list[int] = []
        self._forwards_of: dict[int, list[int]] = {}

    def __contains__(self, task: TaskId) -> bool:
        return task in self._position

    def position(self, task: TaskId) -> int:
        """The task's place in the ranking, from 0."""
        return self._position[task]

    def add(self, task: TaskId) -> None:
        """Mark `task` ready. O(log r)."""
        place = self._position[task]
        if task.kind is TaskKind.F:
            heapq.heappush(self._forwards, place)
            self._forwards_of.setdefault(task.microbatch, []).append(place)
        else:
            heapq.heappush(self._others, place)

    def peek(self, admissible: Admissible) -> TaskId | None:
        """The best ready and admissible task. O(log r), whatever is not admissible."""
        best = self._top(self._others)
        if admissible.any_forward:
            best = min(best, self._top(self._forwards))
        elif admissible.forward_microbatch in self._forwards_of:
            best = min(best, *self._forwards_of[admissible.forward_microbatch])
        return None if best == self._end else self._tasks[best]

    def remove(self, task: TaskId) -> None:
        """Take `task` off the list: it was dispatched."""
        place = self._position[task]
        self._left[place] = True
        before, after = self._previous[place], self._next[place]
        self._next[before], self._previous[after] = after, before
        if task.kind is TaskKind.F:
            same_microbatch = self._forwards_of[task.microbatch]
            same_microbatch.remove(place)
            if not same_microbatch:
                del self._forwards_of[task.microbatch]

    def ahead_of(self, task: TaskId | None) -> Iterator[TaskId]:
        """Tasks not yet dispatched that rank above `task`, best first; all of them for None."""
        stop = self._end if task is None else self._position[task]
        place = self._next[self._end]
        while place < stop:
            yield self._tasks[place]
            place = self._next[place]

    def _top(self, heap: list[int]) -> int:
        while heap and self._left[heap[0]]:
            heapq.heappop(heap)
        return heap[0] if heap else self._end


def _take(tasks: Iterator[TaskId], most: int) -> list[TaskId]:
    return [task for task, _ in zip(tasks, range(most), strict=False)]


class RankedHint(HintOrder):
    """A hint order given by a sort key. Derive from it and define `rank`."""

    def __init__(self) -> None:
        self._queue = RankedQueue(())

    @abstractmethod
    def rank(self, task: TaskId) -> Any:
        """The task's sort key; the smallest is tried first. Compared with one another only."""

    def begin_step(self, tasks: Sequence[TaskId]) -> None:
        """Rank the step's tasks."""
        self._queue = RankedQueue(sorted(tasks, key=self.rank))

    def add(self, task: TaskId) -> None:
        """Mark `task` ready."""
        self._queue.add(task)

    def peek(self, admissible: Admissible) -> TaskId | None:
        """The ready, admissible task with the smallest rank."""
        return self._queue.peek(admissible)

    def commit(self, task: TaskId) -> None:
        """Take `task` out."""
        self._queue.remove(task)

    def position(self, task: TaskId) -> int | None:
        """The task's place among the step's tasks."""
        return self._queue.position(task)

    def ahead_of(self, task: TaskId | None, most: int) -> list[TaskId]:
        """Higher-ranked tasks that are still to come."""
        return _take(self._queue.ahead_of(task), most)


def _direction_rank(task: TaskId) -> tuple[int, int]:
    """Within a direction: forwards of the lower chunk first, backwards of the higher; then age."""
    forward = task.kind is TaskKind.F
    return (task.stage if forward else -task.stage, task.microbatch)


class RoundHint(HintOrder):
    """Rounds of one backward and one forward; a direction with nothing to run is passed over.

    The paper's BF and FB (arXiv 2605.18750, hint orders). What is tried first is the direction
    that was not dispatched last, so the two differ only before a step's first dispatch.
    """

    def __init__(self, *, forward_first: bool) -> None:
        self._forward_first = forward_first
        self._forwards = RankedQueue(())
        self._backwards = RankedQueue(())
        self._forward_turn = forward_first

    def begin_step(self, tasks: Sequence[TaskId]) -> None:
        """Rank each direction on its own and start a new round."""
        ranked = sorted(tasks, key=_direction_rank)
        self._forwards = RankedQueue([task for task in ranked if task.kind is TaskKind.F])
        self._backwards = RankedQueue([task for task in ranked if task.kind is not TaskKind.F])
        self._forward_turn = self._forward_first

    def add(self, task: TaskId) -> None:
        """Mark `task` ready."""
        self._queue_of(task).add(task)

    def peek(self, admissible: Admissible) -> TaskId | None:
        """The best task of the direction whose turn it is, else of the other."""
        first, second = self._turns()
        return first.peek(admissible) or second.peek(admissible)

    def commit(self, task: TaskId) -> None:
        """Take `task` out and give the turn to the other direction."""
        self._queue_of(task).remove(task)
        self._forward_turn = task.kind is not TaskKind.F

    def ahead_of(self, task: TaskId | None, most: int) -> list[TaskId]:
        """What the round would rather have run."""
        first, second = self._turns()
        if task is not None and task in first:
            return _take(first.ahead_of(task), most)
        ahead = _take(first.ahead_of(None), most)
        return ahead + _take(second.ahead_of(task), most - len(ahead))

    def _queue_of(self, task: TaskId) -> RankedQueue:
        return self._forwards if task.kind is TaskKind.F else self._backwards

    def _turns(self) -> tuple[RankedQueue, RankedQueue]:
        if self._forward_turn:
            return self._forwards, self._backwards
        return self._backwards, self._forwards


class DirectionPriority(RankedHint):
    """One direction whenever it has a ready task; the other only where it has none."""

    def __init__(self, *, forward_first: bool) -> None:
        super().__init__()
        self._forward_first = forward_first

    def rank(self, task: TaskId) -> tuple[bool, tuple[int, int]]:
        """The preferred direction, then as in the rounds."""
        return ((task.kind is TaskKind.F) is not self._forward_first, _direction_rank(task))


HINTS: Mapping[str, Callable[[], HintOrder]] = MappingProxyType(
    {
        "bf": lambda: RoundHint(forward_first=False),
        "fb": lambda: RoundHint(forward_first=True),
        "b-priority": lambda: DirectionPriority(forward_first=False),
        "f-priority": lambda: DirectionPriority(forward_first=True),
    }
)
"""The hint orders that have a name."""


def make_hint(hint: Any) -> HintOrder:
    """A fresh hint order for one rank, by name or as a copy of an object.

    Raises:
        ValueError: If the name is not in `HINTS` or the object is no `HintOrder`.
    """
    if isinstance(hint, HintOrder):
        return _copy_of(hint)
    if isinstance(hint, str) and hint in HINTS:
        return HINTS[hint]()
    known = ", ".join(HINTS)
    if isinstance(hint, str):
        raise ValueError(f"hint {hint!r} is not known: use one of {known}, or a HintOrder object")
    raise ValueError(
        f"hint {hint!r} of type {type(hint).__name__} is no hint order: use one of {known}, "
        f"or an instance of a class derived from rrfp_async.HintOrder"
    )


def hint_name(hint: str | HintOrder) -> str:
    """What a hint is called in messages, and by what ranks compare theirs."""
    return hint if isinstance(hint, str) else hint.name


def _copy_of(hint: HintOrder) -> HintOrder:
    try:
        return copy.deepcopy(hint)
    except Exception as error:  # whatever its parts raise
        raise ValueError(
            f"hint {hint.name!r} cannot be copied ({error}), but every rank works on a copy of "
            f"its own: keep only plain data in it, or define __deepcopy__"
        ) from error

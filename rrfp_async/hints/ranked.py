"""Hint orders that are one fixed ranking of a step's tasks, and the queue that makes them fast.

To write an order of your own, derive from `RankedHint`, give `rank`, and pass an instance as
`hint=`.
"""

import heapq
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from rrfp_async.hints.base import Admissible, HintOrder
from rrfp_async.ids import TaskId, TaskKind


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

    @property
    def head(self) -> TaskId | None:
        """The first task that was not dispatched yet, ready or not."""
        place = self._next[self._end]
        return None if place == self._end else self._tasks[place]

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
        """Take `task` off the list: it was dispatched, or is not ready and will not run."""
        place = self._position[task]
        self._left[place] = True
        before, after = self._previous[place], self._next[place]
        self._next[before], self._previous[after] = after, before
        if task.kind is TaskKind.F:  # those always run
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


def take(tasks: Iterator[TaskId], most: int) -> list[TaskId]:
    """The first `most` of `tasks`."""
    return list(islice(tasks, most))


def direction_rank(task: TaskId) -> tuple[int, int]:
    """Within a direction: forwards of the lower chunk first, backwards of the higher; then age."""
    forward = task.kind is TaskKind.F
    return (task.stage if forward else -task.stage, task.microbatch)


def deep_rank(task: TaskId) -> tuple[int, int]:
    """As `direction_rank`, but forwards of the higher chunk first: what is begun is finished."""
    return (-task.stage, task.microbatch)


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

    def drop(self, task: TaskId) -> None:
        """Take `task` out: it will not run."""
        self._queue.remove(task)

    def position(self, task: TaskId) -> int | None:
        """The task's place among the step's tasks."""
        return self._queue.position(task)

    def ahead_of(self, task: TaskId | None, most: int) -> list[TaskId]:
        """Higher-ranked tasks that are still to come."""
        return take(self._queue.ahead_of(task), most)

"""The dynamic orders: rounds of one task per direction (BF, FB, BFW), and one direction first.

From arXiv 2605.18750, hint orders. Which direction is due follows from what was dispatched last,
so these have no list of positions (rounds) or a trivial one (priorities).
"""

from collections.abc import Sequence

from rrfp_async.hints.base import Admissible, HintOrder
from rrfp_async.hints.ranked import RankedHint, RankedQueue, deep_rank, direction_rank, take
from rrfp_async.ids import TaskId, TaskKind

_BACKWARD = (TaskKind.B, TaskKind.I)


class RoundHint(HintOrder):
    """Rounds of one backward and one forward; a direction with nothing to run is passed over.

    The paper's BF and FB (arXiv 2605.18750, hint orders). What is tried first is the direction
    that was not dispatched last, so the two differ only before a step's first dispatch. BFW is BF
    with the backward split: a W, the oldest, only where neither direction has anything to run;
    then a new round begins. With several chunks a rank, forwards of the lower chunk come first as
    in the paper, or `deep`, of the higher: that wastes fewer places on young work under tight
    limits.
    """

    def __init__(self, *, forward_first: bool, splits: bool = False, deep: bool = False) -> None:
        self.splits = splits
        self._rank = deep_rank if deep else direction_rank
        self._forward_first = forward_first
        self._forwards = RankedQueue(())
        self._backwards = RankedQueue(())
        self._weights = RankedQueue(())
        self._forward_turn = forward_first

    def begin_step(self, tasks: Sequence[TaskId]) -> None:
        """Rank each direction on its own and start a new round."""
        ranked = sorted(tasks, key=self._rank)
        self._forwards = RankedQueue([task for task in ranked if task.kind is TaskKind.F])
        self._backwards = RankedQueue([task for task in ranked if task.kind in _BACKWARD])
        self._weights = RankedQueue([task for task in ranked if task.kind is TaskKind.W])
        self._forward_turn = self._forward_first

    def add(self, task: TaskId) -> None:
        """Mark `task` ready."""
        self._queue_of(task).add(task)

    def peek(self, admissible: Admissible) -> TaskId | None:
        """The best task of the direction whose turn it is, else of the other, else a W."""
        first, second = self._turns()
        return first.peek(admissible) or second.peek(admissible) or self._weights.peek(admissible)

    def commit(self, task: TaskId) -> None:
        """Take `task` out and give the turn to the other direction; W begins a new round."""
        self._queue_of(task).remove(task)
        if task.kind is TaskKind.W:
            self._forward_turn = self._forward_first
        else:
            self._forward_turn = task.kind is not TaskKind.F

    def drop(self, task: TaskId) -> None:
        """Take `task` out; the turn stays where it is."""
        self._queue_of(task).remove(task)

    def ahead_of(self, task: TaskId | None, most: int) -> list[TaskId]:
        """What the round would rather have run."""
        ahead: list[TaskId] = []
        for queue in (*self._turns(), self._weights):
            last = task is not None and task in queue
            ahead += take(queue.ahead_of(task if last else None), most - len(ahead))
            if last:
                break
        return ahead

    def _queue_of(self, task: TaskId) -> RankedQueue:
        if task.kind is TaskKind.F:
            return self._forwards
        return self._weights if task.kind is TaskKind.W else self._backwards

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
        return ((task.kind is TaskKind.F) is not self._forward_first, direction_rank(task))

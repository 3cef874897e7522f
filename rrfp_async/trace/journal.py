"""The last things that happened on a rank, in memory: for error messages and stall reports.

Cheap enough to be always on. It does not know which of them matter.
"""

from collections import deque
from collections.abc import Callable

from rrfp_async.ids import TaskId

_KEPT = 512
_TOLD_MOST = 8


class Journal:
    """A bounded memory of events, each about one task.

    Attributes:
        events: How many events there were, kept or not. It stands still when nothing happens.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.events = 0
        self._clock = clock
        self._begun_s = clock()
        self._kept: deque[tuple[float, str, TaskId]] = deque(maxlen=_KEPT)

    def begin_step(self) -> None:
        """Start again: times count from here."""
        self.events = 0
        self._begun_s = self._clock()
        self._kept.clear()

    def note(self, what: str, task: TaskId) -> None:
        """Remember that `what` happened to `task` now."""
        self.events += 1
        self._kept.append((self._clock(), what, task))

    def about(self, task: TaskId) -> tuple[str, ...]:
        """The last events of the task's microbatch on this rank, oldest first, as lines."""
        near = [
            f"{time_s - self._begun_s:.6f} s: {what} {other}"
            for time_s, what, other in self._kept
            if other.microbatch == task.microbatch
        ]
        return tuple(near[-_TOLD_MOST:])

    def last(self) -> str:
        """The latest event and its age, as words."""
        if not self._kept:
            return "nothing has happened"
        time_s, what, task = self._kept[-1]
        return f"last {what} {task} {self._clock() - time_s:.1f} s ago"

"""Where a rank's time goes in a step: computing, waiting for arrivals, agreeing with the others.

Told when the device was taken and left, and since when the loop has been waiting. It does not
know tasks.
"""

from collections.abc import Callable


class Accounts:
    """One rank's times in the current step, in seconds.

    Attributes:
        compute_s: The device was computing.
        blocking_s: The device had nothing to do and the loop waited for an event.
        coordination_s: The ranks agreed on the step's beginning, or on a task.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free_since_s = 0.0
        self.begin_step()

    def begin_step(self) -> None:
        """Start counting."""
        self.compute_s = self.blocking_s = self.coordination_s = 0.0
        self._unfinished = 0
        self._blocked_s = 0.0  # since the device was free
        self._blocked_until_s = 0.0

    def begin_tasks(self) -> None:
        """From now on the device could have computed."""
        self._free_since_s = self._clock()

    def idle_s(self) -> float:
        """How long the device has had nothing to do, in seconds."""
        return 0.0 if self._unfinished else max(0.0, self._clock() - self._free_since_s)

    def launched(self) -> None:
        """A task's work was launched and is not known to be done."""
        self._unfinished += 1

    def finished(self) -> None:
        """Work that was launched is done."""
        self._unfinished -= 1

    def computed(self, started_s: float, finished_s: float) -> float:
        """A task held the device from `started_s`, or from when it was free, to `finished_s`.

        Returns:
            How long it held it.
        """
        self._blocked_s = 0.0
        held_s = finished_s - max(started_s, self._free_since_s)
        self.compute_s += held_s
        self._free_since_s = finished_s
        return held_s

    def agreed(self, started_s: float, ready_s: float) -> float:
        """A task that was ready at `ready_s` on all ranks that run it starts at `started_s`.

        What the loop has waited since is agreeing, not blocking; a hand-off after it was neither.
        To be told before `computed`.

        Returns:
            How long it could have run before, in seconds.
        """
        could_s = max(self._free_since_s, ready_s)
        wait_s = max(0.0, started_s - could_s)
        moved_s = min(self._blocked_s, max(0.0, self._blocked_until_s - could_s))
        self.blocking_s -= moved_s
        self.coordination_s += moved_s
        return wait_s

    def idle_since(self) -> float | None:
        """Now, if the device has nothing to do, so that waiting from here on is blocking.

        None while work is known to be under way: what its end takes to be heard of is no waiting.
        """
        return None if self._unfinished else max(self._clock(), self._free_since_s)

    def blocked_since(self, since_s: float) -> float:
        """The loop has waited since then, with nothing to do for the device; returns the time."""
        now = max(self._clock(), since_s)
        self.blocking_s += now - since_s
        self._blocked_s += now - since_s
        self._blocked_until_s = now
        return now

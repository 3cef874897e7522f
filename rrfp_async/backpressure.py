"""How many forwards may be in flight on a rank, and which one is let in when room is short.

Let D be the forwards decided on this rank whose gradient is not yet accumulated (by B, or where the
backward is split by W, whose operands are kept until then), C its model
chunks, bound = limit for C = 1 and limit + C above, and u the lowest microbatch that still has a
forward to run here. A forward of u is admissible while D < bound, any other while D < bound - C;
everything else always is. The C places kept for u are what makes this free of deadlock: with
them, the oldest microbatch can always reach the end of the pipeline and free its places again,
whatever order the others came in. Without them a single stage with limit 1 that takes F1 first
can never accumulate microbatch 0 in order.

An order that is executed as it stands keeps no places back: its own peak is its bound.

A forward-only step retains nothing: there a forward is admissible while fewer than the bound of
this rank's sends are open.

This file knows counts. It does not know which tasks are ready or what an activation weighs.
"""

from rrfp_async.errors import ProtocolError
from rrfp_async.hints import Admissible
from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.limits import Limit

_ACCUMULATING = (TaskKind.B, TaskKind.W)
_EVERY_FORWARD = Admissible(any_forward=True)
_NO_FORWARD = Admissible(any_forward=False)


class Backpressure:
    """The admission rule of one rank. Tell it what happens, ask it what is admissible.

    Args:
        limit: How many forwards may be in flight.
        chunks: The rank's stages.
        measures: Whether the limit follows what is measured.

    Attributes:
        bound: D never exceeds this. Within a step it may rise and never falls, or the places kept
            for u would be gone. Where a limit in bytes falls, u's forwards are held back too, but
            for as long as an older microbatch is in flight.
        in_flight: D.
        peak: The largest D of this step.
        open_sends: Activations of this rank that no receiver has taken yet.
    """

    def __init__(self, limit: Limit, *, chunks: int = 1, measures: bool = True) -> None:
        self._limit = limit
        self._measures = measures
        self._chunks = chunks
        self.begin_step(0, backward=True)

    def begin_step(
        self, microbatches: int, *, backward: bool, fixed_peak: int | None = None
    ) -> None:
        """Start counting a step.

        Args:
            microbatches: How many the step has.
            backward: Whether it retains activations.
            fixed_peak: The peak of an order that is executed as it stands, else None.

        Raises:
            ValueError: If an explicit limit is below that peak.
        """
        self._limit.begin_step()
        self._backward = backward
        fixed = backward and fixed_peak is not None
        self._kept = 0 if fixed else self._chunks
        self.bound = self._limit.for_peak(fixed_peak or 0) if fixed else self._bound()
        self._wanted = self.bound
        self._undecided = [self._chunks] * microbatches
        self._unfinished = [self._chunks] * microbatches
        self._front = 0
        self._oldest = 0
        self.in_flight = 0
        self.peak = 0
        self.open_sends = 0

    def measured(
        self, *, task_s: float = 0.0, transfer_s: float = 0.0, kept_bytes: int | None = None
    ) -> None:
        """Note how long a task or a transfer took, or what a forward keeps; the limit follows.

        Raises:
            ValueError: If a budget in bytes is too small for any progress.
        """
        if not self._measures:
            return
        changed = self._limit.measured(task_s=task_s, transfer_s=transfer_s, kept_bytes=kept_bytes)
        if self._kept and changed:
            self._wanted = self._bound()
            self.bound = max(self.bound, self._wanted)

    def keep_up_with(self, running: "Backpressure") -> None:
        """Take over the open sends of the rank as it runs, and where its limit has got to.

        For one that counts what is decided, over the same limit.
        """
        self.open_sends = running.open_sends
        if self._kept:
            self._wanted = self._bound()
            self.bound = max(self.bound, self._wanted)

    def _bound(self) -> int:
        limit = self._limit.value if self._backward else self._limit.sends
        return limit + (0 if self._chunks == 1 else self._chunks)

    def admissible(self) -> Admissible:
        """Which forwards may be dispatched now."""
        if not self._backward:
            return _EVERY_FORWARD if self.open_sends < self.bound else _NO_FORWARD
        if self.in_flight < self._wanted - self._kept:
            return _EVERY_FORWARD
        alone = self._front >= self._oldest  # nothing older is left to free a place
        if self.in_flight < (self.bound if alone else min(self.bound, self._wanted)):
            return Admissible(any_forward=False, forward_microbatch=self._oldest)
        return _NO_FORWARD

    @property
    def held(self) -> int:
        """What counts against `bound`: D, or in a forward-only step the open sends."""
        return self.in_flight if self._backward else self.open_sends

    @property
    def oldest_unfinished(self) -> int:
        """The lowest microbatch whose gradient is not accumulated by every chunk."""
        return self._front

    def decided(self, task: TaskId) -> None:
        """Note that `task` was chosen: a forward takes a place."""
        if task.kind is not TaskKind.F:
            return
        self._undecided[task.microbatch] -= 1
        while self._oldest < len(self._undecided) and not self._undecided[self._oldest]:
            self._oldest += 1
        if self._backward:
            self.in_flight += 1
            self.peak = max(self.peak, self.in_flight)

    def completed(self, task: TaskId) -> None:
        """Note that `task` has run: an accumulated gradient frees the forward's place.

        Raises:
            ProtocolError: If no forward holds a place.
        """
        if task.kind in _ACCUMULATING:
            if not self.in_flight:
                raise ProtocolError(f"{task} completed, but no forward was in flight")
            self.in_flight -= 1
            self._unfinished[task.microbatch] -= 1
            while self._front < len(self._unfinished) and not self._unfinished[self._front]:
                self._front += 1

    def send_opened(self) -> None:
        """Note that an activation is on its way out."""
        self.open_sends += 1

    def send_closed(self) -> None:
        """Note that its receiver has it.

        Raises:
            ProtocolError: If no send was open.
        """
        if not self.open_sends:
            raise ProtocolError("a send closed, but none was open")
        self.open_sends -= 1

"""How many forwards may be in flight on a rank: a number, or one that follows from the pipeline.

A limit knows depth, position, times and bytes. It does not count what is in flight, and does not
know which forwards those are. docs/backpressure.md has the measurements behind the numbers here.
"""

import math
from abc import ABC, abstractmethod
from typing import Literal

from rrfp_async.topology import Topology

_SLACK = 8
_SLACK_RISE = 4.0
_LEAST_SHARE = 0.5
_SAMPLES_LEAST = 4


class Limit(ABC):
    """The limit of one rank."""

    @property
    @abstractmethod
    def value(self) -> int:
        """The limit now."""

    @property
    def sends(self) -> int:
        """How many sends may be open in a step that retains nothing."""
        return self.value

    @abstractmethod
    def for_peak(self, peak: int) -> int:
        """The bound of an order that is executed as it stands and has this peak.

        Raises:
            ValueError: If the limit is below it.
        """

    def begin_step(self) -> None:  # noqa: B027 - nothing to do for a number
        """A step begins: what it measures counts from here."""

    def measured(
        self,
        *,
        task_s: float = 0.0,  # noqa: ARG002 - a default
        transfer_s: float = 0.0,  # noqa: ARG002
        kept_bytes: int | None = None,  # noqa: ARG002
    ) -> bool:
        """Note how long a task or a transfer took, or what a forward keeps.

        Returns:
            Whether `value` may have changed.
        """
        return False


class FixedLimit(Limit):
    """A number that the user gave."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    @property
    def value(self) -> int:
        """The number."""
        return self._limit

    def for_peak(self, peak: int) -> int:
        """The number, if it is enough."""
        if self._limit < peak:
            raise ValueError(
                f"limit={self._limit} is below {peak}, the most forwards that the order, executed "
                f"as it stands, holds in flight on a rank: give limit='auto', or {peak} or more"
            )
        return self._limit


class AutoLimit(Limit):
    """A limit that covers the way to the end of the pipeline and back.

    With a stages from here to the end, this one included, and a transfer that takes r times as
    long as a task, a forward's place is taken for about a(1 + r) microbatches. The bound is that,
    at least half as much again where transfers are quick (tasks vary in length), at most twice a,
    and up to eight more where transfers take a quarter of a task or longer, for they vary too. r is
    what this rank measured in the last step, and may rise within this one.

    Where the backward is split, W waits until a rank has nothing else to do. Later ranks have as
    much of it as early ones, so there a is the whole depth on every rank; likewise with several
    chunks, whose last ones are on early ranks too.
    """

    def __init__(self, stages: int, *, beyond: int = 0) -> None:
        self._stages = stages
        self._beyond = beyond
        self._ratio = 0.0
        self._forget()

    @property
    def value(self) -> int:
        """`ceil(a * (1 + min(1, 0.5 + r)) + 8 * min(1, 4 r))`, less what the bound adds to it."""
        places = self._stages * (1.0 + min(1.0, _LEAST_SHARE + self._ratio))
        slack = _SLACK * min(1.0, _SLACK_RISE * self._ratio)
        return max(1, math.ceil(places + slack) - self._beyond)

    def for_peak(self, peak: int) -> int:
        """The peak itself."""
        return peak

    def begin_step(self) -> None:
        """Start from what the last step measured."""
        if self._enough():
            self._ratio = self._measured_ratio()
        self._forget()

    def measured(
        self,
        *,
        task_s: float = 0.0,
        transfer_s: float = 0.0,
        kept_bytes: int | None = None,  # noqa: ARG002 - times are enough here
    ) -> bool:
        """Add a task's or a transfer's time, in seconds; the one that is 0 is not counted."""
        self._task_s += task_s
        self._tasks += task_s > 0.0
        self._transfer_s += transfer_s
        self._transfers += transfer_s > 0.0
        if not self._enough() or self._measured_ratio() <= self._ratio:
            return False
        self._ratio = self._measured_ratio()
        return True

    def _enough(self) -> bool:
        return min(self._tasks, self._transfers) >= _SAMPLES_LEAST and self._task_s > 0.0

    def _measured_ratio(self) -> float:
        return (self._transfer_s / self._transfers) / (self._task_s / self._tasks)

    def _forget(self) -> None:
        self._task_s = self._transfer_s = 0.0
        self._tasks = self._transfers = 0


class BudgetLimit(Limit):
    """Another limit, lowered to what fits into a number of bytes.

    Until a forward's bytes are known, one microbatch at a time is let through the rank. Then the
    limit follows from the largest forward measured, so it may fall when a larger one comes.
    """

    def __init__(self, inner: Limit, budget_bytes: int, *, chunks: int) -> None:
        self._inner = inner
        self._budget_bytes = budget_bytes
        self._chunks = chunks
        self._beyond = chunks if chunks > 1 else 0  # the bound is the limit and so many more
        self._largest_bytes: int | None = None

    @property
    def value(self) -> int:
        """The lower of both; with several chunks 0 is enough for one microbatch at a time."""
        least = self._chunks - self._beyond
        if self._largest_bytes is None:
            return least
        if self._largest_bytes == 0:
            return self._inner.value
        fits = self._budget_bytes // self._largest_bytes - self._beyond
        return max(least, min(self._inner.value, fits))

    @property
    def sends(self) -> int:
        """As the other limit: nothing is retained."""
        return self._inner.sends

    def for_peak(self, peak: int) -> int:
        """As the other limit: what a fixed order keeps is not known before it runs."""
        return self._inner.for_peak(peak)

    def begin_step(self) -> None:
        """What was measured stays."""
        self._inner.begin_step()

    def measured(
        self, *, task_s: float = 0.0, transfer_s: float = 0.0, kept_bytes: int | None = None
    ) -> bool:
        """Note times for the other limit, bytes for this one.

        Raises:
            ValueError: If not even one microbatch fits.
        """
        changed = self._inner.measured(task_s=task_s, transfer_s=transfer_s)
        largest = self._largest_bytes
        if kept_bytes is None or (largest is not None and kept_bytes <= largest):
            return changed
        self._largest_bytes = kept_bytes
        least_bytes = kept_bytes * self._chunks
        if self._budget_bytes < least_bytes:
            raise ValueError(
                f"activation_budget_bytes={self._budget_bytes} is below {least_bytes}, what the "
                f"{self._chunks} forwards that this rank must have in flight keep: give that "
                f"much, or make microbatches smaller"
            )
        return True


def make_limit(
    limit: int | Literal["auto"],
    topology: Topology,
    rank: int,
    *,
    split: bool = False,
    budget_bytes: int | None = None,
) -> Limit:
    """The limit of `rank`.

    Args:
        limit: A number, or `auto`.
        topology: The pipeline.
        rank: Whose limit it is.
        split: Whether backwards are split.
        budget_bytes: What its activations may take, or None.
    """
    chosen: Limit
    if limit == "auto":
        way = _way(topology, rank, split=split)
        chosen = AutoLimit(way, beyond=topology.chunks if topology.chunks > 1 else 0)
    else:
        chosen = FixedLimit(limit)
    if budget_bytes is None:
        return chosen
    return BudgetLimit(chosen, budget_bytes, chunks=topology.chunks)


def _way(topology: Topology, rank: int, *, split: bool) -> int:
    """The stages that a forward's place is taken for, as `AutoLimit` wants them."""
    if split or topology.chunks > 1:
        return topology.depth
    [stage] = topology.stages_of(rank)
    return topology.depth_after(stage) + 1

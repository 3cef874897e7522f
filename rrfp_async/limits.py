"""How many forwards may be in flight on a rank: a number, or one that follows from the pipeline.

A limit knows depth, position and times. It does not count what is in flight, and does not know
which forwards those are. docs/backpressure.md has the measurements behind the numbers here.
"""

import math
from abc import ABC, abstractmethod
from typing import Literal

from rrfp_async.topology import Topology

_SLACK = 8
_LEAST_SHARE = 0.5
_SAMPLES_LEAST = 4


class Limit(ABC):
    """The limit of one rank."""

    @property
    @abstractmethod
    def value(self) -> int:
        """The limit now."""

    @abstractmethod
    def for_peak(self, peak: int) -> int:
        """The bound of an order that is executed as it stands and has this peak.

        Raises:
            ValueError: If the limit is below it.
        """

    def begin_step(self) -> None:  # noqa: B027 - nothing to do for a number
        """A step begins: what it measures counts from here."""

    def measured(self, *, task_s: float = 0.0, transfer_s: float = 0.0) -> bool:  # noqa: ARG002
        """Note how long a task or a transfer took; returns whether `value` may have changed."""
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
    long as a task, a forward's place is taken for about a(1 + r) microbatches. The limit is that,
    at least half as much again where transfers are quick (tasks vary in length), at most twice a,
    and eight more. r is what this rank measured in the last step, and may rise within this one.

    Where the backward is split, W waits until a rank has nothing else to do. Later ranks have as
    much of it as early ones, so there a is the whole depth on every rank.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._ratio = 0.0
        self._forget()

    @property
    def value(self) -> int:
        """`8 + ceil(a * (1 + min(1, 0.5 + r)))`."""
        return _SLACK + math.ceil(self._stages * (1.0 + min(1.0, _LEAST_SHARE + self._ratio)))

    def for_peak(self, peak: int) -> int:
        """The peak itself."""
        return peak

    def begin_step(self) -> None:
        """Start from what the last step measured."""
        if self._enough():
            self._ratio = self._measured_ratio()
        self._forget()

    def measured(self, *, task_s: float = 0.0, transfer_s: float = 0.0) -> bool:
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


def make_limit(
    limit: int | Literal["auto"], topology: Topology, rank: int, *, split: bool = False
) -> Limit:
    """The limit of `rank`, as set in the config; `split` tells whether backwards are split."""
    if limit == "auto":
        if split:
            return AutoLimit(topology.depth)
        to_end = sum(topology.depth_after(stage) + 1 for stage in topology.stages_of(rank))
        return AutoLimit(math.ceil(to_end / topology.chunks))
    return FixedLimit(limit)

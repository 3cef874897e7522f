"""Counters, gauges and histograms of one Runtime, cumulative from its opening to its end.

Named as Prometheus names things, units included, so that any monitoring can take them over. What is
counted per task costs a few hundred nanoseconds; all else is read when somebody asks.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from rrfp_async.bus.base import Bus
from rrfp_async.errors import StateError
from rrfp_async.frontier import Frontier
from rrfp_async.gpu.transfer import Transfer
from rrfp_async.ids import TaskKind
from rrfp_async.tp.agreement import AgreementReport
from rrfp_async.trace.recorder import Recorder

T = TypeVar("T")

SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the histograms' buckets, in seconds; a last bucket takes what is longer."""


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """What was observed so far.

    Attributes:
        bounds: Upper bounds of the buckets, inclusive.
        counts: Of each bucket, and last of what is above all bounds. Not cumulative.
        sum: Of all observations.
        count: Of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    count: int


class Histogram:
    """Observations by bucket.

    Args:
        bounds: Upper bounds of the buckets, rising.
    """

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count `value`."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def value(self) -> HistogramValue:
        """As it stands."""
        return HistogramValue(self._bounds, tuple(self._counts), self._sum, sum(self._counts))


@dataclass(frozen=True, slots=True)
class Metrics:
    """A snapshot. Keys are names with labels, as in `rrfp_task_seconds{kind="F"}`.

    Attributes:
        counters: What only grows.
        gauges: What is so now.
        histograms: How often something took how long.
    """

    counters: Mapping[str, float]
    gauges: Mapping[str, float]
    histograms: Mapping[str, HistogramValue]

    def as_dict(self) -> dict[str, float]:
        """All as flat numbers; of a histogram its count, sum and mean."""
        flat = {**self.counters, **self.gauges}
        for key, held in self.histograms.items():
            name, brace, labels = key.partition("{")
            flat[f"{name}_count{brace}{labels}"] = float(held.count)
            flat[f"{name}_sum{brace}{labels}"] = held.sum
            flat[f"{name}_mean{brace}{labels}"] = held.sum / held.count if held.count else 0.0
        return flat


class Stepped(Protocol):
    """A step's result, as far as it is counted."""

    @property
    def step_s(self) -> float:
        """Seconds it took."""

    @property
    def agreement(self) -> AgreementReport | None:
        """What agreeing came to."""


@dataclass(slots=True)
class Meter:
    """Where one rank's tasks and steps are counted, and what else it has to tell.

    Attributes:
        tasks: Seconds that tasks of each kind held the device; R runs beside it.
        idle: Seconds that the device had had nothing to do when a task was chosen for it.
        steps: Seconds that steps took, by mode.
        agreement: Seconds that tasks waited for the tensor-parallel group, summed up by step.
        retries: How often that group was of several minds.
    """

    tasks: dict[TaskKind, Histogram] = field(
        default_factory=lambda: {kind: Histogram() for kind in TaskKind if kind is not TaskKind.R}
    )
    idle: Histogram = field(default_factory=Histogram)
    steps: dict[str, Histogram] = field(
        default_factory=lambda: {"train": Histogram(), "eval": Histogram()}
    )
    agreement: float = 0.0
    retries: int = 0
    _watched: tuple[Bus, Transfer, Frontier, Recorder] | None = None

    def watch(self, bus: Bus, transfer: Transfer, frontier: Frontier, recorder: Recorder) -> None:
        """Read these, too, when a snapshot is asked for."""
        self._watched = bus, transfer, frontier, recorder

    def stepped(self, mode: str, result: Stepped) -> None:
        """A step has ended well."""
        self.steps[mode].observe(result.step_s)
        if result.agreement is not None:
            self.agreement += result.agreement.wait_s
            self.retries += result.agreement.retries

    def snapshot(self) -> Metrics:
        """All of this as it stands.

        Raises:
            StateError: If there is nothing to read yet.
        """
        if self._watched is None:
            raise StateError("this Runtime was not opened: use `async with Runtime(...) as r:`")
        bus, transfer, frontier, recorder = self._watched
        messages, transfers = bus.statistics(), transfer.statistics()
        room = frontier.backpressure
        steps = {mode: held.value for mode, held in self.steps.items()}
        tasks = {kind.value: held.value for kind, held in self.tasks.items()}
        counters = {
            **_labelled("rrfp_steps_total", "mode", {k: v.count for k, v in steps.items()}),
            **_labelled("rrfp_tasks_total", "kind", {k: v.count for k, v in tasks.items()}),
            "rrfp_tp_wait_seconds_total": self.agreement,
            "rrfp_tp_retries_total": self.retries,
            "rrfp_messages_sent_total": messages.sent,
            "rrfp_messages_received_total": messages.received,
            "rrfp_messages_dropped_total": messages.dropped,
            "rrfp_transfers_total": transfers.completed,
            "rrfp_records_lost_total": recorder.lost,
        }
        gauges = {
            "rrfp_in_flight": room.in_flight,
            "rrfp_in_flight_limit": room.bound,
            "rrfp_open_sends": transfers.open_sends,
            "rrfp_open_receives": transfers.open_receives,
            "rrfp_ready_tasks": len(frontier.arbiter.ready),
            "rrfp_messages_pending": messages.pending,
        }
        histograms = {
            **_labelled("rrfp_step_seconds", "mode", steps),
            **_labelled("rrfp_task_seconds", "kind", tasks),
            "rrfp_idle_seconds": self.idle.value,
        }
        return Metrics(counters, gauges, histograms)


def _labelled(name: str, label: str, values: Mapping[str, T]) -> dict[str, T]:
    return {f'{name}{{{label}="{word}"}}': value for word, value in values.items()}

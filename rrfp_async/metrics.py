"""Counters, gauges and histograms of one Runtime, cumulative from its opening to its end.

Named as Prometheus names things, units included, so that any monitoring can take them over. What is
counted per task costs under a microsecond; all else is read when somebody asks. It does not know
how anything travels: a tensor counts alike whether it came with its header or after it.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Protocol, TypeVar

from rrfp_async.bus.base import Bus
from rrfp_async.errors import StateError
from rrfp_async.frontier import Frontier
from rrfp_async.gpu.transfer import Transfer
from rrfp_async.ids import TaskKind
from rrfp_async.tp.agreement import AgreementReport
from rrfp_async.trace.outcomes import Sized
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
        counts = tuple(self._counts)
        return HistogramValue(self._bounds, counts, self._sum, sum(counts))


@dataclass(slots=True)
class Traffic:
    """Tensors that went one way between this rank and others.

    Attributes:
        transfers: How often one edge's tensors did.
        size_bytes: What all of them take.
    """

    transfers: int = 0
    size_bytes: int = 0

    def count(self, tensors: Sequence[Sized]) -> None:
        """One edge's tensors went; without any, nothing did but a message."""
        if tensors:
            self.transfers += 1
            for tensor in tensors:
                self.size_bytes += tensor.nbytes


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

    def to_prometheus(self) -> str:
        """All in Prometheus's text format: each name with its type, histograms with buckets."""
        kinds: dict[str, Mapping[str, float | HistogramValue]] = {
            "counter": self.counters,
            "gauge": self.gauges,
            "histogram": self.histograms,
        }
        lines = []
        for kind, values in kinds.items():
            for name, keys in groupby(values, _name):
                lines.append(f"# TYPE {name} {kind}")
                for key in keys:
                    lines += _samples(key, values[key])
        return "\n".join(lines) + "\n"


def _name(key: str) -> str:
    return key.partition("{")[0]


def _samples(key: str, value: float | HistogramValue) -> list[str]:
    if not isinstance(value, HistogramValue):
        return [f"{key} {value}"]
    name, brace, labels = key.partition("{")
    others = labels.replace("}", ",")
    bounds = (*map(str, value.bounds), "+Inf")
    counted = zip(bounds, accumulate(value.counts), strict=True)
    lines = [f'{name}_bucket{{{others}le="{bound}"}} {count}' for bound, count in counted]
    ends = (("sum", value.sum), ("count", value.count))
    return [*lines, *(f"{name}_{word}{brace}{labels} {number}" for word, number in ends)]


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
        scale: The loss scale of the last update; None before one, or without a scaler.
        tasks: Seconds that tasks of each kind held the device; of R, which runs beside the others,
            from its beginning to its end.
        idle: Seconds that the device had had nothing to do when a task was chosen for it.
        steps: Seconds that steps took, by mode.
        agreement: Seconds that tasks waited for the tensor-parallel group, summed up by step.
        retries: How often that group was of several minds.
        sent: What other ranks have taken.
        received: What came from them.
    """

    scale: Callable[[], float | None] = lambda: None
    tasks: dict[TaskKind, Histogram] = field(
        default_factory=lambda: {kind: Histogram() for kind in TaskKind}
    )
    idle: Histogram = field(default_factory=Histogram)
    steps: dict[str, Histogram] = field(
        default_factory=lambda: {"train": Histogram(), "eval": Histogram()}
    )
    agreement: float = 0.0
    retries: int = 0
    sent: Traffic = field(default_factory=Traffic)
    received: Traffic = field(default_factory=Traffic)
    _watched: tuple[Bus, Transfer, Frontier, Recorder, Callable[[], int]] | None = None

    def watch(
        self,
        bus: Bus,
        transfer: Transfer,
        frontier: Frontier,
        recorder: Recorder,
        *,
        held: Callable[[], int],
    ) -> None:
        """Read these, too, when a snapshot is asked for; `held` counts messages that were early."""
        self._watched = bus, transfer, frontier, recorder, held

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
        bus, transfer, frontier, recorder, held = self._watched
        messages, transfers = bus.statistics(), transfer.statistics()
        room, scale = frontier.backpressure, self.scale()
        steps = {mode: seconds.value for mode, seconds in self.steps.items()}
        tasks = {kind.value: seconds.value for kind, seconds in self.tasks.items()}
        counters = {
            **_labelled("rrfp_steps_total", "mode", {k: v.count for k, v in steps.items()}),
            **_labelled("rrfp_tasks_total", "kind", {k: v.count for k, v in tasks.items()}),
            "rrfp_tp_wait_seconds_total": self.agreement,
            "rrfp_tp_retries_total": self.retries,
            "rrfp_messages_sent_total": messages.sent,
            "rrfp_messages_received_total": messages.received,
            "rrfp_messages_dropped_total": messages.dropped,
            "rrfp_transfers_sent_total": self.sent.transfers,
            "rrfp_transfers_received_total": self.received.transfers,
            "rrfp_transfer_sent_bytes_total": self.sent.size_bytes,
            "rrfp_transfer_received_bytes_total": self.received.size_bytes,
            "rrfp_records_lost_total": recorder.lost,
        }
        gauges = {
            "rrfp_in_flight": room.in_flight,
            "rrfp_in_flight_limit": room.bound,
            "rrfp_open_sends": transfers.open_sends,
            "rrfp_open_receives": transfers.open_receives,
            "rrfp_ready_tasks": len(frontier.arbiter.ready),
            "rrfp_messages_pending": messages.pending,
            "rrfp_messages_held": held(),
            **({} if scale is None else {"rrfp_gradient_scale": scale}),
        }
        histograms = {
            **_labelled("rrfp_step_seconds", "mode", steps),
            **_labelled("rrfp_task_seconds", "kind", tasks),
            "rrfp_idle_seconds": self.idle.value,
        }
        return Metrics(counters, gauges, histograms)


def _labelled(name: str, label: str, values: Mapping[str, T]) -> dict[str, T]:
    return {f'{name}{{{label}="{word}"}}': value for word, value in values.items()}

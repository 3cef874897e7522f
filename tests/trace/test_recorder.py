"""One rank's recorder, driven by hand: how idle spans begin, go on and end, and what comes last."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from rrfp_async.arbiter import Arbiter
from rrfp_async.backpressure import Backpressure
from rrfp_async.config import Config
from rrfp_async.errors import StepFailed
from rrfp_async.hints import make_order
from rrfp_async.ids import Edge, TaskId, TaskKind
from rrfp_async.limits import FixedLimit
from rrfp_async.ready_set import ReadySet
from rrfp_async.topology import Topology
from rrfp_async.trace.recorder import IDLE_LEAST_S, LoggingRecorder, Whose
from rrfp_async.trace.records import Record
from rrfp_async.trace.writer import Trace

LONG_S = 10 * IDLE_LEAST_S
SHORT_S = 0.4 * IDLE_LEAST_S


class Kept(Trace):
    """Keeps records in memory."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.flushed = 0

    def write(self, record: Record) -> None:
        self.lines.append({"event": record.EVENT, **record.fields()})

    def flush(self) -> None:
        self.flushed = len(self.lines)

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class Rank:
    """Rank 1 of a chain of three, in a step of three microbatches."""

    limit: int = 8
    now_s: float = 100.0
    kept: Kept = field(default_factory=Kept)
    reduced: dict[TaskId, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        topology, config = Topology(3), Config(microbatches=3, hint="bf")
        whose = Whose(1, topology, config, lambda: self.now_s, False)
        self.recorder = LoggingRecorder(whose, self.kept)
        self.ready_set = ReadySet(topology, 1, deterministic=True)
        backpressure = Backpressure(FixedLimit(self.limit))
        order = make_order(config.order, topology, 1, config.execution)
        self.arbiter = Arbiter(order, backpressure)
        self.recorder.watch(self.arbiter, self.ready_set, backpressure, splits=False)
        self.backpressure = backpressure
        tasks = self.ready_set.begin_step(3, backward=True, reduced=self.reduced)
        self.arbiter.begin_step([task for task in tasks if task.kind is not TaskKind.R])
        self.recorder.begin_run(0.0, 0.0)
        self.recorder.open_step(self.now_s)
        self.recorder.begin_step(0, training=True, update=True, sizes=(1, 1, 1))

    def idle(self, for_s: float) -> None:
        """Have nothing to do for so long."""
        self.recorder.idles(self.arbiter.choose(), self.now_s)
        self.now_s += for_s
        self.recorder.idle_until(self.now_s)

    def arrive(self, microbatch: int) -> None:
        """An activation comes."""
        self.arbiter.add(self.ready_set.activation_arrived(Edge(0, 1), microbatch))

    def run(self) -> None:
        """Dispatch what is best, and be done with it at once."""
        decision = self.arbiter.choose()
        assert decision.task is not None
        self.arbiter.commit(decision)
        self.recorder.dispatched(decision, 0.0)
        self.backpressure.completed(decision.task)
        done = self.ready_set.completed(decision.task)
        self.arbiter.add([task for task in done if task.kind is not TaskKind.R])

    def spans(self) -> list[tuple[str, float]]:
        """Cause and length of every idle line."""
        idle = [line for line in self.kept.lines if line["event"] == "idle"]
        return [(line["cause"], pytest.approx(line["end_s"] - line["start_s"])) for line in idle]


def test_a_rank_woken_for_nothing_has_one_span() -> None:
    """Two waits with only a turn of the loop between them."""
    rank = Rank()
    rank.idle(LONG_S)
    rank.now_s += SHORT_S
    rank.idle(LONG_S)
    rank.arrive(0)
    rank.run()
    assert rank.spans() == [("nothing ready", 2 * LONG_S + SHORT_S)]


def test_waits_that_lie_apart_are_two_spans() -> None:
    """Something else went on between them."""
    rank = Rank()
    rank.idle(LONG_S)
    rank.now_s += LONG_S
    rank.idle(2 * LONG_S)
    rank.arrive(0)
    rank.run()
    assert rank.spans() == [("nothing ready", LONG_S), ("nothing ready", 2 * LONG_S)]


def test_a_cause_that_changes_ends_a_span() -> None:
    """At the limit of 1 an activation comes that may not be used yet."""
    rank = Rank(limit=1)
    rank.arrive(0)
    rank.run()
    rank.idle(LONG_S)
    rank.arrive(1)
    rank.idle(2 * LONG_S)
    rank.recorder.idled_for_others(rank.now_s, rank.now_s + LONG_S)
    rank.recorder.failed(StepFailed(rank=0, step=0, cause="no"), None)
    assert rank.spans() == [("nothing ready", LONG_S), ("limit", 2 * LONG_S), ("others", LONG_S)]


def test_a_dispatch_ends_a_span_however_short_the_task() -> None:
    """What follows is another wait, for another thing."""
    rank = Rank()
    rank.idle(LONG_S)
    rank.arrive(0)
    rank.run()
    rank.idle(LONG_S)
    rank.arrive(1)
    rank.run()
    assert rank.spans() == [("nothing ready", LONG_S)] * 2
    waits = [line["waits"][0] for line in rank.kept.lines if line["event"] == "idle"]
    assert [(wait["task"], wait["of"]) for wait in waits] == [("1F0", "0F0"), ("1B0", "2B0")]


def test_a_short_wait_is_not_told() -> None:
    """Below 50 us."""
    rank = Rank()
    rank.idle(SHORT_S)
    rank.arrive(0)
    rank.run()
    assert rank.spans() == []


def test_with_only_reductions_left_a_rank_waits_for_others() -> None:
    """They run beside, and hang on other ranks."""
    rank = Rank(reduced={TaskId(1, TaskKind.R, 0): (1,)})
    for microbatch in range(3):
        rank.arrive(microbatch)
        rank.run()
    for microbatch in range(3):
        rank.arbiter.add(rank.ready_set.gradient_arrived(Edge(1, 2), microbatch))
        rank.run()
    assert rank.ready_set.remaining == 1
    rank.idle(LONG_S)
    rank.recorder.failed(StepFailed(rank=0, step=0, cause="no"), None)
    assert rank.spans() == [("others", LONG_S)]


def test_nothing_comes_after_a_failure_and_that_is_on_its_way_at_once() -> None:
    """A second failure, a task that ends later: neither is written."""
    rank = Rank()
    rank.recorder.failed(StepFailed(rank=2, step=0, cause="first"), "report")
    rank.recorder.failed(StepFailed(rank=1, step=0, cause="second"), None)
    rank.recorder.ran(TaskId.parse("1F0"), 1.0, 2.0)
    assert rank.kept.lines[-1]["cause"] == "first"
    assert rank.kept.flushed == len(rank.kept.lines)


def test_an_agreement_is_a_line_of_the_step() -> None:
    """What the ranks that compute a stage together decided."""
    rank = Rank()
    rank.recorder.agreed(12, TaskId.parse("1F0"), leader=0, wait_s=0.25, retries=1)
    assert rank.kept.lines[-1] == {
        "event": "tp",
        "step": 0,
        "number": 12,
        "task": "1F0",
        "leader": 0,
        "wait_s": 0.25,
        "retries": 1,
    }

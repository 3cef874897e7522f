"""What happens in a rank's steps, told as it happens and written down if there is a log.

The one place that knows which record an event makes. It watches the decision core where a rank is
idle, to say what was missing; it never changes it.
"""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from types import MappingProxyType

from rrfp_async.arbiter import Arbiter, Decision, Reason
from rrfp_async.backpressure import Backpressure
from rrfp_async.config import Config
from rrfp_async.errors import StepFailed
from rrfp_async.grid import Column, coordinates
from rrfp_async.ids import Edge, TaskId, TaskKind
from rrfp_async.ready_set import ReadySet
from rrfp_async.topology import Topology
from rrfp_async.trace.outcomes import Sized, StepTimes
from rrfp_async.trace.records import (
    SCHEMA,
    AgreementRecord,
    Cause,
    Direction,
    DispatchRecord,
    FailureRecord,
    IdleRecord,
    Record,
    RunRecord,
    StepBeginRecord,
    StepEndRecord,
    TaskRecord,
    TransferRecord,
    VoidRecord,
    Wait,
)
from rrfp_async.trace.waiting import WAITS_MOST, Waiting
from rrfp_async.trace.writer import Trace, open_trace

IDLE_LEAST_S = 50e-6
"""Shorter idle spans are not told; spans of one cause that are closer together are one."""

_READY_MOST = 8
_CAUSES = MappingProxyType(
    {
        Reason.NOTHING_READY: Cause.NOTHING_READY,
        Reason.BACKPRESSURE: Cause.LIMIT,
        Reason.FIXED_ORDER: Cause.FIXED_ORDER,
        Reason.UNDECIDED: Cause.AGREEMENT,
    }
)
_FREEING = (TaskKind.B, TaskKind.W, TaskKind.I)


class Recorder:
    """Told everything, keeps nothing. Every method is cheap and none raises.

    Attributes:
        keeps: Whether what it is told is written down.
        run_begun: Whether it knows how this rank's clock relates to rank 0's.
    """

    keeps = False
    run_begun = False

    @property
    def lost(self) -> int:
        """Records that could not be written."""
        return 0

    def watch(
        self, arbiter: Arbiter, ready_set: ReadySet, backpressure: Backpressure, *, splits: bool
    ) -> None:
        """Look there for what is missing when the rank is idle."""

    def begin_run(self, offset_s: float, error_s: float) -> None:
        """How this rank's clock relates to rank 0's is known now."""

    def open_step(self, begun_s: float) -> None:
        """A step was asked for, at that time."""

    def begin_step(
        self, step: int, *, training: bool, update: bool, sizes: tuple[int, ...]
    ) -> None:
        """The ranks have agreed what the step is."""

    def dispatched(self, decision: Decision, waited_s: float) -> None:
        """A choice can no longer change; the device had been idle for `waited_s` seconds."""

    def void(self, task: TaskId) -> None:
        """A backward will not run."""

    def ran(self, task: TaskId, start_s: float, end_s: float) -> None:
        """A task held the device."""

    def transferred(
        self,
        task: TaskId,
        edge: Edge,
        direction: Direction,
        peer: int,
        tensors: Sequence[Sized],
        *,
        begun_s: float,
        packed: bool = False,
    ) -> None:
        """What `task` made has reached its receiver now, or at once with its header."""

    def idles(self, decision: Decision, since_s: float) -> None:
        """The device has nothing to do since then, and the decision says why."""

    def idle_until(self, end_s: float) -> None:
        """Until then it has had nothing to do."""

    def idled_for_others(self, since_s: float, end_s: float) -> None:
        """This rank's tasks were done, and it waited for other ranks."""

    def agreed(
        self, number: int, task: TaskId, *, leader: int | None, wait_s: float, retries: int = 0
    ) -> None:
        """The ranks that compute a stage together agreed on a task."""

    def end_step(self, result: StepTimes) -> None:
        """The step ended well."""

    def failed(self, failure: StepFailed, report: str | None) -> None:
        """The step failed; nothing that comes after this is kept."""

    def close(self) -> None:
        """Write what is pending, within a bounded time. Twice is harmless."""


@dataclass(frozen=True, slots=True)
class Whose:
    """The rank whose records these are.

    Attributes:
        rank: Its number.
        topology: The pipeline.
        config: Its Runtime's.
        clock: Seconds, monotonic.
        simulated: Whether those are virtual.
    """

    rank: int
    topology: Topology
    config: Config
    clock: Callable[[], float]
    simulated: bool

    def run_record(self, offset_s: float, error_s: float | None) -> RunRecord:
        """The first line."""
        topology, config = self.topology, self.config
        return RunRecord(
            schema=SCHEMA,
            rank=self.rank,
            pp=topology.pp,
            dp=topology.dp,
            tp=topology.tp,
            stages=topology.num_stages,
            owners=tuple(map(topology.rank_of, range(topology.num_stages))),
            owned=tuple(topology.stages_of(coordinates(topology, self.rank).pp)),
            edges=tuple(topology.graph),
            hint=config.hint_name,
            limit=config.limit,
            microbatches=config.microbatches,
            host=socket.gethostname(),
            pid=os.getpid(),
            clock_offset_s=offset_s,
            clock_error_s=error_s,
            simulated=self.simulated,
            version=version("rrfp-async"),
        )


class LoggingRecorder(Recorder):
    """Makes a record of everything, and hands it to a trace."""

    keeps = True

    def __init__(self, whose: Whose, trace: Trace) -> None:
        self._whose = whose
        self._clock = whose.clock
        self._rank = whose.rank
        self._trace = trace
        self._write: Callable[[Record], None] = trace.write
        self._step = 0
        self._begun_s = 0.0
        self._idle: IdleRecord | None = None  # begun, and may go on
        self._idle_until_s = 0.0

    @property
    def lost(self) -> int:
        """As the trace counts them."""
        return self._trace.statistics()["lost"]

    def watch(
        self, arbiter: Arbiter, ready_set: ReadySet, backpressure: Backpressure, *, splits: bool
    ) -> None:
        """See `Recorder`."""
        self._arbiter = arbiter
        self._ready_set = ready_set
        self._backpressure = backpressure
        column = Column.of(self._whose.topology, self._whose.rank)
        self._waiting = Waiting(ready_set, column, self._whose.rank, splits=splits)
        self._own_stages = self._whose.topology.stages_of(
            coordinates(self._whose.topology, self._whose.rank).pp
        )

    def begin_run(self, offset_s: float, error_s: float) -> None:
        """The first line."""
        self.run_begun = True
        self._write(self._whose.run_record(offset_s, error_s))

    def open_step(self, begun_s: float) -> None:
        """See `Recorder`."""
        self._begun_s = begun_s
        self._idle = None

    def begin_step(
        self, step: int, *, training: bool, update: bool, sizes: tuple[int, ...]
    ) -> None:
        """Its first line, with the time it was asked for; what comes now belongs to it."""
        self._step = step
        self._write(StepBeginRecord(step, self._begun_s, training, update, sizes))

    def dispatched(self, decision: Decision, waited_s: float) -> None:
        """Also ends an idle span."""
        if self._idle is not None:
            self._end_idle()
        self._write(DispatchRecord(self._step, self._rank, decision, waited_s, self._clock()))

    def void(self, task: TaskId) -> None:
        """See `Recorder`."""
        self._write(VoidRecord(self._step, self._rank, task))

    def ran(self, task: TaskId, start_s: float, end_s: float) -> None:
        """See `Recorder`."""
        self._write(TaskRecord(self._step, task, start_s, end_s))

    def transferred(
        self,
        task: TaskId,
        edge: Edge,
        direction: Direction,
        peer: int,
        tensors: Sequence[Sized],
        *,
        begun_s: float,
        packed: bool = False,
    ) -> None:
        """See `Recorder`."""
        size = sum(tensor.nbytes for tensor in tensors)
        end_s = begun_s if packed else self._clock()
        what = (task, edge, direction, peer, size, packed, begun_s, end_s)
        self._write(TransferRecord(self._step, *what))

    def idles(self, decision: Decision, since_s: float) -> None:
        """Look at what is missing, unless that is still the same span."""
        cause = _CAUSES[decision.reason]
        held_back = cause is Cause.LIMIT
        wanted = [] if held_back else self._arbiter.wanted(WAITS_MOST)
        if not (held_back or wanted):
            cause = Cause.OTHERS  # reductions run beside
        if self._goes_on(cause, since_s):
            return
        self._end_idle()
        admissible = self._backpressure.admissible()
        if held_back or (wanted and not admissible.any_forward):
            wanted = [*self._next_to_free(), *wanted]
        ready: tuple[TaskId, ...] = ()
        if decision.ready:
            ready = tuple(sorted(self._arbiter.ready, key=str)[:_READY_MOST])
        waits = self._waiting.of(wanted, admissible)
        self._idle = self._span(since_s, cause, ready=ready, waits=waits)

    def idle_until(self, end_s: float) -> None:
        """The span may go on, if the rank was woken for nothing."""
        self._idle_until_s = end_s

    def idled_for_others(self, since_s: float, end_s: float) -> None:
        """See `Recorder`."""
        if not self._goes_on(Cause.OTHERS, since_s):
            self._end_idle()
            self._idle = self._span(since_s, Cause.OTHERS)
        self.idle_until(end_s)

    def _span(
        self,
        since_s: float,
        cause: Cause,
        *,
        ready: tuple[TaskId, ...] = (),
        waits: tuple[Wait, ...] = (),
    ) -> IdleRecord:
        room = self._backpressure
        return IdleRecord(self._step, since_s, since_s, cause, ready, room.held, room.bound, waits)

    def _goes_on(self, cause: Cause, since_s: float) -> bool:
        span = self._idle
        return (
            span is not None and span.cause is cause and since_s - self._idle_until_s < IDLE_LEAST_S
        )

    def _next_to_free(self) -> list[TaskId]:
        """What gives a place back: the backward of the oldest microbatch in flight."""
        oldest = self._backpressure.oldest_unfinished
        tasks = (
            TaskId(stage, kind, oldest) for stage in reversed(self._own_stages) for kind in _FREEING
        )
        return [task for task in tasks if self._ready_set.missing(task)]

    def _end_idle(self) -> None:
        span, self._idle = self._idle, None
        if span is not None and self._idle_until_s - span.start_s >= IDLE_LEAST_S:
            self._write(replace(span, end_s=self._idle_until_s))

    def agreed(
        self, number: int, task: TaskId, *, leader: int | None, wait_s: float, retries: int = 0
    ) -> None:
        """See `Recorder`."""
        self._write(AgreementRecord(self._step, number, task, leader, wait_s, retries))

    def end_step(self, result: StepTimes) -> None:
        """Its last line."""
        self._end_idle()
        spent = (result.compute_s, result.blocking_s, result.coordination_s, result.other_s)
        end_s = self._begun_s + result.step_s
        came_to = (result.loss, result.peak_in_flight)
        self._write(StepEndRecord(self._step, end_s, result.step_s, *spent, *came_to))

    def failed(self, failure: StepFailed, report: str | None) -> None:
        """The last line, on its way at once."""
        if self._write is _forget:
            return
        if not self.run_begun:
            self._write(self._whose.run_record(0.0, None))
        self._end_idle()
        where = (failure.rank, failure.stage, failure.task, failure.microbatch, failure.cause)
        self._write(FailureRecord(failure.step, self._clock(), *where, report))
        self._write = _forget
        self._trace.flush()

    def close(self) -> None:
        """See `Recorder`."""
        self._trace.close()


def _forget(_record: Record) -> None:
    """Where records go after the last."""


def open_recorder(whose: Whose) -> Recorder:
    """A recorder that writes into `config.trace_dir`, or one that keeps nothing.

    Raises:
        OSError: If the log cannot be opened.
        ValueError: If another Runtime is writing it.
    """
    folder = whose.config.trace_dir
    if folder is None:
        return Recorder()
    return LoggingRecorder(whose, open_trace(folder, whose.rank))

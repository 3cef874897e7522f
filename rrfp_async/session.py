"""When steps begin, end and fail, across all ranks.

The first rank announces a step once every rank has greeted it with equal settings, and ends it
once every rank has run its tasks. So a step that returns on one rank has succeeded on all. The
session is handed its messages by the dispatcher, and may send; it does not know what a step's
tasks are.

A message may come before its step is open here: from a rank that is ahead, or right behind the
message that ended the last step. It is held until then, so that nothing a later step brings can
undo an earlier one, and nothing is lost.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from rrfp_async.bus.base import Bus
from rrfp_async.bus.messages import (
    ClockAsk,
    ClockTold,
    Failure,
    Farewell,
    GradientReport,
    Hello,
    Message,
    PeerLost,
    Progress,
    RankDone,
    Spent,
    StepBegin,
    StepEnd,
    Verdict,
)
from rrfp_async.clocks import Alignment, ClockProbe
from rrfp_async.errors import BusError, ProtocolError, StepFailed
from rrfp_async.grid import Column
from rrfp_async.ids import TaskId
from rrfp_async.topology import Topology

FIRST_RANK = 0
"""The rank that announces steps and ends them."""

_HELD_MOST = 65_536
_NOTHING_TO_TELL = GradientReport(norms=None, finite=True, scale=None)

Settings = tuple[tuple[str, str], ...]
Judge = Callable[[Mapping[int, GradientReport]], Verdict | None]
M = TypeVar("M")


def _no_verdict(_reports: Mapping[int, GradientReport]) -> None:
    """Where no rank clips or scales."""


class Session:
    """One rank's view of the steps that all ranks go through together.

    The first step begins when every rank has greeted the first one; with `begins_together` every
    step does.

    Attributes:
        steps_done: Steps that have ended well; the number of the current or next one.
    """

    def __init__(
        self,
        *,
        bus: Bus,
        rank: int,
        topology: Topology,
        settings: Settings,
        clock: Callable[[], float],
        stall_timeout_s: float,
        begins_together: bool = False,
        judge: Judge = _no_verdict,
    ) -> None:
        self.steps_done = 0
        self._bus = bus
        self._rank = rank
        self._world_size = topology.world_size
        columns = [Column(topology, dp) for dp in range(topology.dp)]
        self._loss_ranks = [column.rank_of(topology.last_stage) for column in columns]
        self._settings = settings
        self._clock = clock
        self._begins_together = begins_together
        self._judge = judge
        self._stall_timeout_s = stall_timeout_s
        self._greeted: set[int] = set()
        self._all_greeted = asyncio.Event()
        self._left: set[int] = set()
        self._held: deque[tuple[int, Message]] = deque()
        self._in_step = False
        self._clock_probe = ClockProbe(
            clock, lambda number: bus.send_nowait(FIRST_RANK, ClockAsk(number))
        )
        self._handlers: Mapping[type[Message], Callable[[int, Any], None]] = {
            Hello: self._on_hello,
            StepBegin: self._on_step_begin,
            RankDone: self._on_rank_done,
            StepEnd: self._on_step_end,
            Progress: self._on_progress,
            ClockAsk: self._on_clock_ask,
            ClockTold: lambda _source, told: self._clock_probe.told(told.number, told.time_s),
            Failure: self._on_failure,
            Farewell: self._on_farewell,
            PeerLost: self._on_peer_lost,
        }

    # -- the course of a step ------------------------------------------------------------------

    def open_step(self, *, training: bool, update: bool) -> None:
        """This rank is ready for its next step, of that mode."""
        loop = asyncio.get_running_loop()
        self._training = training
        self._update = update
        self._announced: asyncio.Future[StepBegin] = loop.create_future()
        self._ended: asyncio.Future[StepEnd] = loop.create_future()
        self._done: dict[int, RankDone] = {}
        self._progress: dict[int, Progress] = {}
        self._progressed_s = self._clock()
        self._in_step = True

    async def begin(self, sizes: tuple[int, ...] | None, seed: int) -> StepBegin:
        """Announce the step (on the first rank, with its `sizes`) or wait for its announcement.

        Returns:
            The samples of each microbatch and the seed, equal on every rank.

        Raises:
            StepFailed: If a rank has failed or left before.
        """
        held, self._held = self._held, deque()
        for source, message in held:
            self.handle(source, message)
        greets = self.steps_done == 0 or self._begins_together
        if self._rank != FIRST_RANK or sizes is None:
            if greets:
                self._bus.send_nowait(FIRST_RANK, Hello(self._settings))
            return await self._announced
        if self._world_size > 1 and greets:
            await self._all_greeted.wait()
            self._greeted.clear()
            self._all_greeted.clear()
        begin = StepBegin(self.steps_done, self._training, self._update, seed, sizes)
        self._tell_all(begin)
        return begin

    async def align_clocks(self) -> Alignment:
        """How this rank's clock relates to the first one's, which must be in the same step."""
        return await self._clock_probe.measure()

    async def end(
        self,
        loss: float | None,
        gradients: GradientReport | None = None,
        spent_s: Spent = (0.0, 0.0, 0.0),
    ) -> tuple[float | None, Verdict | None]:
        """Say that this rank's tasks are done, as `RankDone` tells it; wait for all others.

        Returns:
            The step's loss, equal on every rank; None for an evaluation without a target. And how
            to update, also equal; None if no rank reported on its gradients.
        """
        done = RankDone(self.steps_done, loss, gradients, spent_s)
        if self._rank == FIRST_RANK:
            self._on_rank_done(self._rank, done)
        else:
            self._bus.send_nowait(FIRST_RANK, done)
        ended = await self._ended
        return ended.loss, ended.verdict

    @property
    def spent_s(self) -> tuple[Spent, ...]:
        """Of the step that has ended, every rank's times; known to the first rank only."""
        if self._rank != FIRST_RANK:
            return ()
        return tuple(self._done[rank].spent_s for rank in range(self._world_size))

    def report_progress(self, events: int, report: str) -> None:
        """Tell how far this rank is; `report` is what it waits for, if nothing has happened.

        The first rank judges: it hears from all. It tells all in turn, so that they know it does.

        Raises:
            StepFailed: On the first rank, if no rank has progressed within the stall timeout; on
                others, if the first rank was not heard in this step for twice that.
        """
        progress = Progress(self.steps_done, events, report)
        timeout_s = self._stall_timeout_s
        if self._rank == FIRST_RANK:
            self._on_progress(self._rank, progress)
            self._tell_all(progress)
        else:
            self._bus.send_nowait(FIRST_RANK, progress)
            timeout_s *= 2  # the first rank knows more, if it is there
        if self._clock() - self._progressed_s >= timeout_s:
            raise StepFailed(rank=FIRST_RANK, step=self.steps_done, cause=self._stalled())

    # -- failing and leaving -------------------------------------------------------------------

    def failed(
        self,
        error: BaseException,
        task: TaskId | None = None,
        *,
        step: int | None = None,
        records: tuple[str, ...] = (),
    ) -> StepFailed:
        """`error`, which arose on this rank, as the end of `step` (by default, of the current)."""
        return StepFailed(
            rank=self._rank,
            step=self.steps_done if step is None else step,
            stage=None if task is None else task.stage,
            task=None if task is None else str(task),
            microbatch=None if task is None else task.microbatch,
            cause=_told(error),
            records=records,
        )

    def tell_failure(self, error: BaseException) -> StepFailed:
        """Tell every rank of a step that `error` ended, also if another rank told us.

        What this rank says next is that it leaves; whoever hears that first must know why.

        Returns:
            What it told.
        """
        failed = error if isinstance(error, StepFailed) else self.failed(error)
        fields = (failed.stage, failed.task, failed.microbatch, failed.cause, failed.records)
        self._tell_reachable(Failure(failed.step, failed.rank, *fields))
        return failed

    def say_farewell(self) -> None:
        """Tell every rank that this one takes part in no further step."""
        self._tell_reachable(Farewell(self.steps_done))

    # -- what others say -----------------------------------------------------------------------

    def handle(self, source: int, message: Message) -> None:
        """Act on a message, headers apart, now or once its step is open.

        Raises:
            StepFailed: If another rank failed or left.
            ProtocolError: If the message has no place here.
        """
        if isinstance(message, Farewell):
            self._left.add(source)
        if not self.is_early(message):
            self._handlers[type(message)](source, message)
            return
        if len(self._held) >= _HELD_MOST:
            raise ProtocolError(f"{_HELD_MOST} early messages wait; the last from rank {source}")
        self._held.append((source, message))

    def is_early(self, message: Message) -> bool:
        """Whether `message` belongs to a step that is not open here yet.

        Raises:
            ProtocolError: If it belongs to one that has ended.
        """
        match message:
            case Progress() | ClockAsk() | ClockTold():
                return False
            case Hello() | PeerLost():
                return not self._in_step
            case Failure():
                return not self._in_step or message.step > self.steps_done
            case Farewell():
                return not self._in_step or message.steps > self.steps_done
        if message.step < self.steps_done:
            raise ProtocolError(f"{message} came in step {self.steps_done}")
        return not self._in_step or message.step > self.steps_done

    def _on_hello(self, source: int, message: Hello) -> None:
        if message.settings != self._settings:
            raise ProtocolError(_difference(source, message.settings, self._rank, self._settings))
        self._greeted.add(source)
        if len(self._greeted) == self._world_size - 1:
            self._all_greeted.set()

    def _on_step_begin(self, source: int, message: StepBegin) -> None:
        if message.training != self._training:
            called = "train_step" if self._training else "eval_step"
            raise ProtocolError(
                f"rank {self._rank} called {called} for step {message.step}, rank {source} the "
                f"other one: call the same on every rank"
            )
        if message.update != self._update:
            raise ProtocolError(
                f"rank {self._rank} called train_step(update={self._update}) for step "
                f"{message.step}, rank {source} the other one: give the same on every rank"
            )
        _settle(self._announced, message)

    def _on_rank_done(self, source: int, message: RankDone) -> None:
        self._done[source] = message
        if len(self._done) == self._world_size:
            told = {rank: self._done[rank].gradients for rank in range(self._world_size)}
            reports = {rank: report or _NOTHING_TO_TELL for rank, report in told.items()}
            verdict = self._judge(reports) if any(told.values()) else None
            end = StepEnd(message.step, self._loss(), verdict)
            self._tell_all(end)
            self._on_step_end(self._rank, end)

    def _loss(self) -> float | None:
        """The mean over the replicas; of ranks that compute a stage together the first one's."""
        losses = [self._done[rank].loss for rank in self._loss_ranks]
        told = [loss for loss in losses if loss is not None]
        return sum(told) / len(told) if told else None

    def _on_step_end(self, _source: int, message: StepEnd) -> None:
        _settle(self._ended, message)
        self._in_step = False
        self.steps_done += 1

    def _on_progress(self, source: int, message: Progress) -> None:
        if not self._in_step or message.step != self.steps_done:
            return
        before = self._progress.get(source)
        judged = self._rank == FIRST_RANK
        if not judged or before is None or before.events != message.events:
            self._progressed_s = self._clock()
        self._progress[source] = message

    def _on_clock_ask(self, source: int, message: ClockAsk) -> None:
        self._bus.send_nowait(source, ClockTold(message.number, self._clock()))

    def _on_failure(self, _source: int, message: Failure) -> None:
        raise StepFailed(
            rank=message.rank,
            step=message.step,
            stage=message.stage,
            task=message.task,
            microbatch=message.microbatch,
            cause=message.cause,
            records=message.records,
        )

    def _on_farewell(self, source: int, message: Farewell) -> None:
        cause = f"it closed its Runtime with {message.steps} steps done: run as many on every rank"
        raise StepFailed(rank=source, step=self.steps_done, cause=cause)

    def _on_peer_lost(self, source: int, message: PeerLost) -> None:
        if source not in self._left:
            raise StepFailed(rank=source, step=self.steps_done, cause=message.reason)

    def _stalled(self) -> str:
        """Why the step is given up: what each rank said last."""
        if self._rank != FIRST_RANK:
            waited_s = 2 * self._stall_timeout_s
            what = "said anything in" if self._announced.done() else "announced"
            return f"it has not {what} the step within {waited_s} s (twice stall_timeout_s)"
        reports = []
        for rank in range(self._world_size):
            progress = self._progress.get(rank)
            told = "is not in this step" if progress is None else progress.report or "no report"
            reports.append(f"rank {rank}: {told}")
        told = "; ".join(reports)
        return f"nothing progressed on any rank for {self._stall_timeout_s} s. {told}"

    def _tell_all(self, message: Message) -> None:
        for rank in range(self._world_size):
            if rank != self._rank:
                self._bus.send_nowait(rank, message)

    def _tell_reachable(self, message: Message) -> None:
        """Tell whom it can: some peers, or the bus itself, may be what failed."""
        for rank in range(self._world_size):
            if rank != self._rank:
                with suppress(BusError):
                    self._bus.send_nowait(rank, message)


def _settle(future: "asyncio.Future[M]", message: M) -> None:
    if future.cancelled():  # whoever waited was cancelled, and the step with it
        return
    if future.done():
        raise ProtocolError(f"{message} came twice")
    future.set_result(message)


def _told(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "the step was cancelled there (by its caller, Ctrl-C or SIGTERM)"
    return f"{type(error).__name__}: {error}"


def _difference(rank: int, theirs: Settings, own_rank: int, own: Settings) -> str:
    """The settings that differ between two ranks, as a message."""
    their, mine = dict(theirs), dict(own)
    told = "; ".join(
        f"{name} is {their.get(name)} on rank {rank} and {mine.get(name)} on rank {own_rank}"
        for name in {**mine, **their}
        if mine.get(name) != their.get(name)
    )
    return f"settings differ: {told}. Give every rank the same"

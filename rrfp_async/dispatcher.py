"""The loop of one rank: events come in, the arbiter chooses, tasks run, headers and tensors go out.

The only reader of the bus. Everything of a step lives in the TaskGroups of `run_step`: a reader
that turns messages into events, one task per open transfer, and the dispatch loop itself, which
runs one compute task at a time and never waits for a transfer. It does not know how a batch is
split, what a module computes, or when the optimizer steps.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from rrfp_async.bus.messages import AgreementMessage, Header, Message, StepBegin
from rrfp_async.clocks import SAME_CLOCK, Alignment, SharedClock
from rrfp_async.config import Config
from rrfp_async.errors import DataExhausted, ProtocolError, StepFailed, TransferError
from rrfp_async.executor import EXPLAIN_S, Executor
from rrfp_async.frontier import Frontier
from rrfp_async.gpu.transfer import unpacked
from rrfp_async.ids import Link, TaskId, TaskKind, TensorSpec
from rrfp_async.metrics import Meter
from rrfp_async.outbox import Outbox
from rrfp_async.reduction import Reduction
from rrfp_async.session import FIRST_RANK, Session
from rrfp_async.tasks.batch import Arguments, Batch
from rrfp_async.tasks.kinds import deliver
from rrfp_async.tasks.stage import Stage
from rrfp_async.tasks.step import RankTimes, StepReport, StepRequest, check_sizes, stage_inputs
from rrfp_async.tp.group import make_agreement
from rrfp_async.trace.journal import Journal
from rrfp_async.trace.recorder import Recorder
from rrfp_async.trace.records import Direction
from rrfp_async.world import Wires, World

_HELD_MOST = 65_536


class Dispatcher:
    """Runs the steps of one rank, one at a time.

    Attributes:
        report_at_end: What was ready here and waited for when the last step failed, if it did.
    """

    def __init__(
        self,
        *,
        world: World,
        wires: Wires,
        config: Config,
        stages: Mapping[int, Stage],
        recorder: Recorder,
        session: Session,
        meter: Meter | None = None,
    ) -> None:
        topology = world.topology
        self._world = world
        self._wires = wires
        self._keep_outputs = config.return_outputs
        self._takes_inputs = any(stage.is_source for stage in stages.values())
        self._stages = stages
        self._session = session
        self._frontier = frontier = Frontier(topology, world.place.pp, config)
        self._held: deque[tuple[int, Header | AgreementMessage]] = deque()
        self._transfers: asyncio.TaskGroup | None = None  # set while headers can be acted on
        self.report_at_end: str | None = None
        self._first_failure: Exception | None = None
        self._ending = False
        self._journal = Journal(world.clock)
        self._recorder = recorder
        watched = (frontier.arbiter, frontier.ready_set, frontier.backpressure)
        recorder.watch(*watched, splits=config.splits)
        meter = Meter() if meter is None else meter
        meter.watch(wires.bus, wires.transfer, frontier, recorder, held=lambda: len(self._held))
        self._received = meter.received
        self._stall_timeout_s = config.stall_timeout_s
        self._wake = asyncio.Event()
        self._clock = SharedClock(world.clock)
        self._alignment: Alignment | None = None
        self._agreement = make_agreement(
            frontier,
            topology=topology,
            rank=world.rank,
            config=config,
            send=wires.bus.send_nowait,
            clock=self._clock,
            changed=self._wake.set,
        )
        self._outbox = Outbox(
            world,
            wires,
            session,
            frontier.backpressure,
            self._journal,
            recorder=recorder,
            sent=meter.sent,
            changed=self._wake.set,
            broke=self._transfer_broke,
        )
        send = partial(self._outbox.put, at_once=True)
        self._reduction = Reduction(world, wires, stages, send=send)
        self._executor = Executor(
            world=world,
            wires=wires,
            stages=stages,
            frontier=frontier,
            agreement=self._agreement,
            outbox=self._outbox,
            session=session,
            journal=self._journal,
            recorder=recorder,
            reduce=self._reduction.run,
            wake=self._wake,
            meter=meter,
            ahead=config.activation_budget_bytes is None,
        )

    async def run_step(self, request: StepRequest) -> StepReport:
        """Run one step together with every other rank.

        Raises:
            ValueError: If this rank's batch does not fit the step.
            StepFailed: If anything else ends the step, here or elsewhere.
        """
        self._executor.begin_step()
        self._journal.begin_step()
        self._first_failure = self.report_at_end = None
        self._ending = False
        self._session.open_step(training=request.training, update=request.update)
        try:
            async with asyncio.TaskGroup() as group:
                company = [group.create_task(self._read()), group.create_task(self._watch())]
                report = await self._run(request)
                self._ending = True  # well: what is cancelled now is no failure
                for task in company:
                    task.cancel()
                return report
        except BaseExceptionGroup as errors:
            failure = self._came_first()
            if failure is None:  # cancelled before anything failed
                raise asyncio.CancelledError from errors
        finally:
            self._transfers = None
            self._outbox.end_step()
            self._executor.end_step()
            self._reduction.end_step()
            self._end_stages()
            self._agreement.end_step()
            self._frontier.end_step()
        if isinstance(failure, StepFailed | ValueError | DataExhausted):
            raise failure
        raise self._session.failed(failure) from failure

    def _came_first(self) -> Exception | None:
        return self._first_failure

    @contextmanager
    def _part_of_step(self) -> Iterator[None]:
        """Note what ends first, before the TaskGroups wind the rest of the step up."""
        try:
            yield
        except BaseException as error:
            self._note_end(error)
            raise

    def _note_end(self, error: BaseException) -> None:
        if not self._ending:
            self.report_at_end = self._report()
            self._first_failure = error if isinstance(error, Exception) else None
        self._ending = True
        self._outbox.end_step()

    # -- the course of a step ------------------------------------------------------------------

    async def _run(self, request: StepRequest) -> StepReport:
        clock, accounts = self._world.clock, self._executor.accounts
        begun, number = clock(), self._session.steps_done
        with self._part_of_step():
            batch = await request.batch()
            arguments = batch.split_inputs() if self._takes_inputs else []
            own_sizes = batch.sizes(arguments) if arguments else None
            begin = await self._session.begin(own_sizes, request.seed)
            check_sizes(own_sizes, begin.sizes, called=self._world.called)
            self._world.device.follow_caller()
            if self._recorder.keeps or self._world.topology.tp > 1:
                await self._align_clocks()
            self._begin_records(begin)
        accounts.coordination_s += clock() - begun
        async with asyncio.TaskGroup() as self._transfers:
            self._outbox.begin_step(self._transfers, training=request.training)
            with self._part_of_step():
                self._begin(request, batch, arguments, begin)
                await self._executor.run_all(self._transfers, training=request.training)
            drained = clock()
        self._executor.waited_for_others(drained)
        with self._part_of_step():
            if request.training:
                for stage in self._stages.values():
                    stage.complete_gradients()
            losses, own_loss = await self._losses()
            told = None
            if request.report is not None:
                told = (await self._world.device.run(request.report)).value
            done = clock()
            spent = (accounts.compute_s, accounts.blocking_s, accounts.coordination_s)
            loss, verdict = await self._session.end(own_loss, told, spent)
        self._executor.waited_for_others(done)
        outputs = [output for stage in self._stages.values() for output in stage.outputs()]
        spent = (accounts.compute_s, accounts.blocking_s, accounts.coordination_s)
        peak, agreement = self._frontier.backpressure.peak, self._executor.agreement_report
        ranks = tuple(RankTimes(*times) for times in self._session.spent_s)
        return StepReport(number, loss, losses, outputs, *spent, peak, verdict, agreement, ranks)

    async def _align_clocks(self) -> None:
        """Before the first step, find out how this rank's clock relates to the first one's."""
        if self._alignment is None:
            world = self._world
            shared = world.begins_together or world.settle is not None or world.rank == FIRST_RANK
            aligned = SAME_CLOCK if shared else await self._session.align_clocks()
            self._clock.follow(aligned)
            self._alignment = aligned

    def _begin_records(self, begin: StepBegin) -> None:
        """Tell the log of the step; before the first, how clocks relate."""
        if self._alignment is not None and not self._recorder.run_begun:
            self._recorder.begin_run(self._alignment.offset_s, self._alignment.error_s)
        mode = {"training": begin.training, "update": begin.update}
        self._recorder.begin_step(begin.step, **mode, sizes=begin.sizes)

    def _begin(
        self,
        request: StepRequest,
        batch: Batch,
        arguments: list[Arguments],
        begin: StepBegin,
    ) -> None:
        """Set up the step's tasks, then act on the headers that came before them."""
        for stage in self._stages.values():
            inputs = stage_inputs(stage, request, batch, arguments, begin)
            stage.begin_step(replace(inputs, keep_outputs=True) if self._keep_outputs else inputs)
        split = [stage.index for stage in self._stages.values() if stage.splits]
        reduced: dict[TaskId, Sequence[int | TaskId]] = {}
        if request.update:
            reduced = self._reduction.tasks()
            self._reduction.begin_step()
        count, backward = len(begin.sizes), request.training
        self._frontier.begin_step(count, backward=backward, split=split, reduced=reduced)
        self._agreement.begin_step(begin.step, count, backward=backward, split=split)
        held, self._held = self._held, deque()
        for source, header in held:
            self._handle(source, header)

    async def _losses(self) -> tuple[list[float], float | None]:
        """The last stage's losses, read where their tensors are; nothing on other ranks."""
        for stage in self._stages.values():
            if stage.is_last:
                return (await self._world.device.run(stage.losses)).value
        return [], None

    def _end_stages(self) -> None:
        for stage in reversed(list(self._stages.values())):  # of a module in two, the first
            stage.end_step()

    # -- tensors that come in -------------------------------------------------------------------

    async def _receive(self, header: Header, specs: list[TensorSpec]) -> None:
        begun = self._world.clock()
        try:
            tensors = await self._wires.transfer.receive(header.link, header.sequence, specs)
            self._world.device.adopt(tensors)
            self._record_arrival(header, tensors, begun, packed=False)
            self._deliver(header, tensors)
        except BaseException as error:
            await self._transfer_broke(error)
            raise

    async def _transfer_broke(self, error: BaseException) -> None:
        """Let the bus speak first where a transfer breaks: it knows whether the peer is gone."""
        if isinstance(error, TransferError):
            await asyncio.sleep(EXPLAIN_S)
        self._note_end(error)

    def _deliver(self, header: Header, tensors: list[torch.Tensor]) -> None:
        """Take in what a task of another rank sent."""
        edge, task = header.edge, header.task
        if task.kind is TaskKind.R:
            self._reduction.take(header, tensors)
            return
        deliver(self._stages, task, header, tensors)
        self._journal.note("received the result of", task)
        self._executor.begin_reductions(self._agreement.arrived(edge, task))
        self._wake.set()

    def _transfer_group(self) -> asyncio.TaskGroup:
        if self._transfers is None:
            raise ProtocolError("a transfer was to start outside a step")
        return self._transfers

    # -- messages ------------------------------------------------------------------------------

    async def _read(self) -> None:
        with self._part_of_step():
            await self._wires.bus.deliver(self._handle)

    async def _watch(self) -> None:
        """Tell from time to time how far this rank is, so that a stall is found and explained."""
        before = -1
        with self._part_of_step():
            while True:
                await asyncio.sleep(min(self._stall_timeout_s / 4, self._world.progress_every_s))
                events = self._journal.events
                self._session.report_progress(events, self._report() if events == before else "")
                before = events

    def _report(self) -> str:
        """What is ready here, what is waited for, and which transfers are open, in words."""
        transfers = self._wires.transfer.statistics()
        ready = ", ".join(sorted(map(str, self._frontier.arbiter.ready))[:8]) or "nothing"
        agreement = self._agreement.summary()
        return (
            f"{ready} ready; {self._frontier.ready_set.summary()}; "
            f"{agreement + '; ' if agreement else ''}{transfers.open_sends} sends and "
            f"{transfers.open_receives} receives open; {self._journal.last()}"
        )

    def _handle(self, source: int, message: Message) -> None:
        """Act on a message now, or hold a header until its step and its tasks are there."""
        if not isinstance(message, Header | AgreementMessage):
            self._session.handle(source, message)
        elif self._session.is_early(message) or self._transfers is None:
            if len(self._held) >= _HELD_MOST:
                raise ProtocolError(f"{_HELD_MOST} early headers wait; the last from rank {source}")
            self._held.append((source, message))
        elif self._ending:
            return
        elif isinstance(message, Header):
            self._on_header(source, message)
        else:
            self._agreement.on_message(source, message)

    def _on_header(self, source: int, header: Header) -> None:
        if header.link != Link(source, self._world.rank) or not self._expects(header):
            raise ProtocolError(f"{header} from rank {source} has no place here")
        specs = [spec for spec in header.specs if spec is not None]
        if specs and header.payload is None:
            self._transfer_group().create_task(self._receive(header, specs))
        else:
            tensors = unpacked(header.payload or b"", specs)
            self._record_arrival(header, tensors, self._world.clock(), packed=True)
            self._deliver(header, tensors)

    def _record_arrival(
        self, header: Header, tensors: list[torch.Tensor], begun_s: float, *, packed: bool
    ) -> None:
        where = (header.edge, Direction.RECEIVE, header.link.source, tensors)
        self._recorder.transferred(header.task, *where, begun_s=begun_s, packed=packed)
        self._received.count(tensors)

    def _expects(self, header: Header) -> bool:
        """Whether something in this step waits for what the header announces."""
        edge, microbatch = header.edge, header.task.microbatch
        match header.task.kind:
            case TaskKind.F:
                return self._frontier.ready_set.expects_activation(edge, microbatch)
            case TaskKind.R:
                return self._reduction.expects(edge, microbatch)
        return self._frontier.ready_set.expects_gradient(edge, microbatch)

"""The loop of one rank's tasks: the arbiter chooses, the device runs, results leave.

One task computes at a time. A device that can take back what it has not begun is given the next
task while one runs, so that it goes from one to the next without waiting for the event loop; until
it does, every event may change that choice. So what runs is always the best of what was ready when
the device became free, as far as the loop had heard. On other devices the choice is made when one
task has ended, or was launched.

It does not know where arrivals come from, how a step begins or ends, or what a task computes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from rrfp_async.accounts import Accounts
from rrfp_async.arbiter import Decision, Reason
from rrfp_async.errors import StepFailed
from rrfp_async.frontier import Frontier
from rrfp_async.gpu.ambient import Ambient
from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.mesh import is_broken_collective
from rrfp_async.metrics import Meter
from rrfp_async.outbox import Outbox
from rrfp_async.session import Session
from rrfp_async.tasks.kinds import KINDS, Outcome, TaskContext, TaskCoroutine
from rrfp_async.tasks.stage import Stage
from rrfp_async.tasks.step import most_kept
from rrfp_async.tp.agreement import Agreed, Agreement, AgreementReport
from rrfp_async.trace.journal import Journal
from rrfp_async.trace.recorder import Recorder
from rrfp_async.world import Wires, World

EXPLAIN_S = 2.0
"""How long what breaks with a peer waits for the bus to say that the peer is gone, in seconds."""


class Executor:
    """Runs the tasks of one rank, step after step.

    Whoever changes what may run sets `wake`. Without `ahead`, no task is given while one runs:
    what that one is measured to keep in memory decides about the next.

    Attributes:
        accounts: Where the rank's time goes.
        agreement_report: What agreeing came to in this step; None where nothing is agreed.
    """

    def __init__(
        self,
        *,
        world: World,
        wires: Wires,
        stages: Mapping[int, Stage],
        frontier: Frontier,
        agreement: Agreement,
        outbox: Outbox,
        session: Session,
        journal: Journal,
        recorder: Recorder,
        reduce: Callable[[TaskId], Awaitable[None]],
        wake: asyncio.Event,
        meter: Meter,
        ahead: bool,
    ) -> None:
        self.accounts = Accounts(world.clock)
        self.agreement_report: AgreementReport | None = None
        self._world = world
        self._topology = world.topology
        self._stages = stages
        self._device = world.device.lane()
        self._context = TaskContext(
            stages, world.topology.is_local, self._device, wires.transfer.export
        )
        self._frontier = frontier
        self._agreement = agreement
        self._outbox = outbox
        self._session = session
        self._journal = journal
        self._recorder = recorder
        self._reduce_gradients = reduce
        self._wake = wake
        self._meter = meter
        self._ahead = ahead and self._device.takes_back
        self._agreed: dict[TaskId, Agreed] = {}
        self._given: dict[TaskId, TaskCoroutine] = {}
        self._next: tuple[Decision, TaskId, float] | None = None  # given, and may be taken back
        self._failure: Exception | None = None

    def begin_step(self) -> None:
        """Start a step: count its time, and compute as its caller's thread is set to."""
        self._context.ambient = Ambient.of_caller(self._device.torch_device)
        self.accounts.begin_step()
        self.agreement_report = None
        self._failure = None

    def end_step(self) -> None:
        """Of a step that failed, take back what the device has not begun and leave what runs."""
        self._context.steps_ended += 1
        for task, coroutine in self._given.items():
            self._device.withdraw(task)
            coroutine.close()
        self._given.clear()
        self._agreed.clear()
        self._next = None

    async def run_all(self, group: asyncio.TaskGroup, *, training: bool) -> None:
        """Run this rank's tasks of the step, each as soon as the arbiter lets it.

        Args:
            group: Where what runs beside this lives.
            training: In evaluation open sends are the bound, so a task's must be counted before
                the next is chosen.

        Raises:
            StepFailed: If a task fails.
        """
        self._beside = group
        self.accounts.begin_tasks()
        while self._frontier.ready_set.remaining:
            if self._world.settle is not None:
                await self._world.settle()
                if not self._frontier.ready_set.remaining:
                    break  # the last reduction has ended meanwhile: nothing else would wake us
            self._check()
            decision = self._agreement.choose()
            if decision.task is None:
                await self._wait(decision)
            elif self._ahead and training:
                await self._run_ahead(decision, decision.task)
            else:
                await self._run_alone(decision, decision.task)
        while self._given:
            await self._wait()
            self._check()
        self._outbox.flush()

    # -- one after the other -------------------------------------------------------------------

    async def _run_alone(self, decision: Decision, task: TaskId) -> None:
        """Run a task to its end, or to its launch."""
        self._commit(decision, task, self.accounts.idle_s())
        outcome = await self._run(task)
        self._settle(task)
        if outcome.computed.finish is None:
            self._leave(task, outcome, outcome.computed.finished_s)
        else:  # what comes next here may be launched behind it, headers must wait
            self.accounts.launched()
            self._beside.create_task(self._leave_later(task, outcome, outcome.computed.finish))
        self._complete(task)

    async def _leave_later(
        self, task: TaskId, outcome: Outcome, finish: "asyncio.Future[float]"
    ) -> None:
        with self._failing_the_step():
            try:
                finished_s = await finish
            except Exception as error:
                raise self._task_failed(error, task) from error
            self.accounts.finished()
            self._leave(task, outcome, finished_s)
            self._wake.set()

    # -- the next while one runs ---------------------------------------------------------------

    async def _run_ahead(self, decision: Decision, task: TaskId) -> None:
        """Give a task to the device, and wait until that is sure to be the next it runs."""
        self._next = decision, task, self.accounts.idle_s()
        self._give(task)
        if len(self._given) == 1:
            self._commit_next()
        while self._next is not None:  # the one before it runs: its place can be had
            await self._wait()
            self._check()
            if self._next is not None:
                self._choose_again(*self._next)

    def _choose_again(self, _before: Decision, task: TaskId, idle_s: float) -> None:
        """Something has come: maybe another task should be the next."""
        decision = self._agreement.choose()
        if decision.task is None:
            return
        if decision.task != task:
            if not self._device.withdraw(task):
                return  # it runs, and the end of the one before it is about to be told
            self._forget(task)
            self._give(decision.task)
        self._next = decision, decision.task, idle_s

    def _commit_next(self) -> None:
        """The device runs the next task now: what comes can change that no more."""
        if self._next is not None:
            (decision, task, idle_s), self._next = self._next, None
            self._commit(decision, task, idle_s)
            self._complete(task)

    def _give(self, task: TaskId) -> None:
        self.accounts.launched()
        self._given[task] = KINDS[task.kind](self._context, task)
        self._resume(task, self._given[task])

    def _forget(self, task: TaskId) -> None:
        self._given.pop(task).close()
        self.accounts.finished()

    def _resume(self, task: TaskId, coroutine: TaskCoroutine, _awaited: object = None) -> None:
        """Run a given task's coroutine to what it awaits next, or to its end.

        Without a task of the loop around it, it reaches the device at once, not a turn later.
        """
        if self._given.get(task) is not coroutine:
            return  # taken back, or the step has ended
        with self._failing_the_step():
            try:
                awaited = coroutine.send(None)
            except StopIteration as ended:
                del self._given[task]
                self.accounts.finished()
                self._settle(task)
                self._leave(task, ended.value, ended.value.computed.finished_s)
                self._commit_next()
                self._wake.set()
            except asyncio.CancelledError:  # the one before it failed, and ends the step
                self._forget(task)
            except Exception as error:
                if is_broken_collective(error):
                    self._beside.create_task(self._fail_later(error, task))
                    return
                raise self._task_failed(error, task) from error
            else:
                awaited.add_done_callback(partial(self._resume, task, coroutine))

    # -- what both do --------------------------------------------------------------------------

    async def _run(self, task: TaskId) -> Outcome:
        try:
            return await KINDS[task.kind](self._context, task)
        except Exception as error:
            if is_broken_collective(error):
                await asyncio.sleep(EXPLAIN_S)
            raise self._task_failed(error, task) from error

    async def _fail_later(self, error: Exception, task: TaskId) -> None:
        """A collective broke: the bus knows whether one of its members is gone, and says so."""
        with self._failing_the_step():
            await asyncio.sleep(EXPLAIN_S)
            raise self._task_failed(error, task) from error

    def _commit(self, decision: Decision, task: TaskId, waited_s: float) -> None:
        """The choice is made: the device runs `task` now, or next for sure."""
        agreed = self._agreement.commit(decision)
        if agreed is not None:
            self._agreed[task] = agreed
        self._journal.note("dispatched", task)
        self._recorder.dispatched(decision, waited_s)
        self._meter.idle.observe(waited_s)

    def _complete(self, task: TaskId) -> None:
        """What waits for `task` on this rank may run: on its device it comes after it."""
        self.begin_reductions(self._frontier.completed(task))

    def begin_reductions(self, tasks: Iterable[TaskId]) -> None:
        """Start what runs beside the rank's tasks."""
        for task in tasks:
            self._begin_reduction(task)

    def _begin_reduction(self, task: TaskId) -> None:
        reduction = self._reduce(task)
        try:
            self._beside.create_task(reduction)
        except RuntimeError:  # the step is being wound up
            reduction.close()
            raise

    async def _reduce(self, task: TaskId) -> None:
        with self._failing_the_step():
            decision = Decision(task, None, len(self._frontier.arbiter.ready), (), Reason.BESIDE)
            self._recorder.dispatched(decision, 0.0)
            self._journal.note("dispatched", task)
            begun_s = self._world.clock()
            try:
                await self._reduce_gradients(task)
            except Exception as error:
                raise self._task_failed(error, task) from error
            self._journal.note("completed", task)
            self._meter.tasks[task.kind].observe(self._world.clock() - begun_s)
            self._complete(task)
            self._wake.set()

    def _settle(self, task: TaskId) -> None:
        """A forward has run: wait for no gradient that it does not want, run no empty backward."""
        stage, microbatch = self._stages[task.stage], task.microbatch
        if task.kind is not TaskKind.F or stage.wants_gradient(microbatch):
            return
        if self._agreement.leaves_out and stage.is_settled(microbatch):
            for dropped in self._frontier.drop_backward(task):
                self._recorder.void(dropped)
        self.begin_reductions(self._agreement.ungraded(task))

    def _leave(self, task: TaskId, outcome: Outcome, finished_s: float) -> None:
        """The task has left the device: count its time there, and send what it made."""
        self._journal.note("completed", task)
        self._note_agreement(task, outcome.computed.started_s)
        held_s = self.accounts.computed(outcome.computed.started_s, finished_s)
        self._meter.tasks[task.kind].observe(held_s)
        self._recorder.ran(task, finished_s - held_s, finished_s)
        self._frontier.backpressure.measured(
            task_s=held_s, kept_bytes=most_kept(self._stages.values())
        )
        for outgoing in outcome.outgoing:
            if not self._topology.is_local(outgoing.edge):
                self._outbox.put(task, outgoing, at_once=bool(self._given))
        self._agreement.finished(task)

    def _note_agreement(self, task: TaskId, started_s: float) -> None:
        agreed = self._agreed.pop(task, None)
        if agreed is None:
            return
        wait_s = self.accounts.agreed(started_s, agreed.ready_s)
        before = self.agreement_report or AgreementReport(0, 0.0, 0)
        self.agreement_report = AgreementReport(
            before.decisions + 1, before.wait_s + wait_s, before.retries + agreed.retries
        )
        leader, retries = self._agreement.leader, agreed.retries
        self._recorder.agreed(agreed.number, task, leader=leader, wait_s=wait_s, retries=retries)

    async def _wait(self, decision: Decision | None = None) -> None:
        """Wait for an event; `decision` says why nothing runs, if nothing does."""
        idle_since_s = self.accounts.idle_since()
        if idle_since_s is not None and decision is not None:
            self._recorder.idles(decision, idle_since_s)
        self._wake.clear()
        await self._wake.wait()
        if idle_since_s is not None:
            self._recorder.idle_until(self.accounts.blocked_since(idle_since_s))

    def waited_for_others(self, since_s: float) -> None:
        """This rank's tasks were done then, and it has waited for other ranks since."""
        self._recorder.idled_for_others(since_s, self.accounts.blocked_since(since_s))

    def _check(self) -> None:
        """Raise what has failed beside the loop."""
        if self._failure is not None:
            raise self._failure
        self._outbox.check()

    @contextmanager
    def _failing_the_step(self) -> Iterator[None]:
        """Beside the loop: what is raised in here is raised in the loop, where the step ends."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error
            self._wake.set()

    def _task_failed(self, error: Exception, task: TaskId) -> StepFailed:
        return self._session.failed(error, task, records=self._journal.about(task))

"""What a rank's tasks send: a header on the bus, then, unless it came with it, the transfer.

Tasks put their results in; they leave in that order, each link's under its own running number, once
the device has its next task. It knows links and transfers, and neither what is received nor which
task runs next.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable

from rrfp_async.backpressure import Backpressure
from rrfp_async.bus.messages import Header
from rrfp_async.errors import TransferError
from rrfp_async.ids import Link, TaskId, TaskKind
from rrfp_async.metrics import Traffic
from rrfp_async.session import Session
from rrfp_async.tasks.boundary import Outgoing
from rrfp_async.trace.journal import Journal
from rrfp_async.trace.recorder import Recorder
from rrfp_async.trace.records import Direction
from rrfp_async.world import Wires, World


class Outbox:
    """One rank's sends, step after step.

    Args:
        world: Whose sends they are.
        wires: Where they go.
        session: Numbers the steps.
        backpressure: Told of sends that open and close.
        journal: Told of sends that ended.
        recorder: Likewise.
        sent: Likewise.
        changed: Called when there may be room for another task, or the step is to fail.
        broke: Awaited with what a transfer raised, before it ends the step.
    """

    def __init__(
        self,
        world: World,
        wires: Wires,
        session: Session,
        backpressure: Backpressure,
        journal: Journal,
        *,
        recorder: Recorder,
        sent: Traffic,
        changed: Callable[[], None],
        broke: Callable[[BaseException], Awaitable[None]],
    ) -> None:
        self._column = world.column
        self._clock = world.clock
        self._wires = wires
        self._session = session
        self._backpressure = backpressure
        self._journal = journal
        self._recorder = recorder
        self._sent = sent
        self._changed = changed
        self._broke = broke
        self._sequences: Counter[Link] = Counter()
        self._waiting: deque[tuple[TaskId, Outgoing]] = deque()
        self._group: asyncio.TaskGroup | None = None
        self._training = False
        self._failure: Exception | None = None

    def begin_step(self, group: asyncio.TaskGroup, *, training: bool) -> None:
        """Start a step whose transfers live in `group`."""
        self._group = group
        self._training = training

    def end_step(self) -> None:
        """Send no more: of a step that failed, what has not left is forgotten."""
        self._group = self._failure = None
        self._waiting.clear()

    def put(self, task: TaskId, outgoing: Outgoing, *, at_once: bool) -> None:
        """Take what `task` made for another rank.

        It leaves at once, or else at the loop's next turn: by then the next task was chosen and
        the device, which has been free since `task` ended, has it. In evaluation, where open
        sends are the bound, it always leaves before the next choice.
        """
        self._waiting.append((task, outgoing))
        if at_once or not self._training:
            self._send_waiting()
        elif len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._send_soon)

    def flush(self) -> None:
        """Send all that waits.

        Raises:
            Exception: What a send raised, this one or an earlier one.
        """
        self.check()
        self._send_waiting()

    def check(self) -> None:
        """Raise what an earlier send raised, if one did."""
        if self._failure is not None:
            raise self._failure

    def _send_soon(self) -> None:
        try:
            self._send_waiting()
        except Exception as error:  # it ends the step where that waits
            self._failure = error
            self._changed()

    def _send_waiting(self) -> None:
        while self._waiting and self._group is not None:
            self._send(self._group, *self._waiting.popleft())

    def _send(self, group: asyncio.TaskGroup, task: TaskId, outgoing: Outgoing) -> None:
        """Send the header, then start the transfer: the receiver posts once it has the header."""
        column, along = self._column, task.stage == outgoing.edge.source
        route = column.activation_link if along else column.gradient_link
        link = route(outgoing.edge)
        number, sequence = self._session.steps_done, self._sequences[link]
        packs = self._training and outgoing.tensors  # in evaluation open sends are the bound
        payload = self._wires.transfer.pack(outgoing.tensors) if packs else None
        what = (outgoing.edge, task, outgoing.specs, payload, outgoing.layout)
        header = Header(number, link, sequence, *what)
        announced_s = self._clock()
        self._wires.bus.send_nowait(link.target, header)
        if outgoing.tensors and payload is None:
            self._sequences[link] += 1
            if task.kind is TaskKind.F:
                self._backpressure.send_opened()
            group.create_task(self._transfer(header, outgoing, announced_s))
        else:
            self._record(header, outgoing, announced_s, packed=True)

    def _record(
        self, header: Header, outgoing: Outgoing, announced_s: float, *, packed: bool
    ) -> None:
        where = (header.edge, Direction.SEND, header.link.target, outgoing.tensors)
        self._recorder.transferred(header.task, *where, begun_s=announced_s, packed=packed)
        self._sent.count(outgoing.tensors)

    async def _transfer(self, header: Header, outgoing: Outgoing, announced_s: float) -> None:
        """Send an edge's tensors, which must not have changed by the time the receiver has them."""
        begun = self._clock()
        try:
            await self._wires.transfer.send(header.link, header.sequence, outgoing.tensors)
            self._check_unchanged(outgoing, header.task)
        except BaseException as error:
            await self._broke(error)
            raise
        self._backpressure.measured(transfer_s=self._clock() - begun)
        self._journal.note("sent the result of", header.task)
        self._record(header, outgoing, announced_s, packed=False)
        if header.task.kind is TaskKind.F:
            self._backpressure.send_closed()
        self._changed()  # there may be room for a forward now

    def _check_unchanged(self, outgoing: Outgoing, task: TaskId) -> None:
        """Refuse what the stage wrote to while it was under way, as a failure of its task."""
        try:
            outgoing.check_unchanged(task)
        except TransferError as error:
            raise self._session.failed(error, task) from error

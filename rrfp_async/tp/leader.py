"""The first rank of a group decides for all, one task ahead of what runs.

Every rank tells the leader what has come to it. What has come to all, and what waits only for
tasks that are decided already, may be decided: the sequence of decisions is run in order by every
rank, so that a decided task is as good as done for what may be decided next. While a task runs the
next is decided and on its way, and no rank waits for an answer; there is nothing to agree on twice.

The leader decides with a frontier of its own, over the decided sequence; its rank runs that
sequence as the others do. The rule follows a search by brute force: were decided forwards not
counted at once, half of all runs would pass the limit, and some would deadlock.
"""

from collections import defaultdict, deque
from collections.abc import Collection

from rrfp_async.arbiter import Decision, Reason
from rrfp_async.backpressure import Backpressure
from rrfp_async.bus.messages import AgreementMessage, TpArrival, TpDecision
from rrfp_async.clocks import SharedClock
from rrfp_async.errors import ProtocolError
from rrfp_async.frontier import Frontier
from rrfp_async.ids import Edge, TaskId, TaskKind
from rrfp_async.tp.agreement import Agreed, Arrivals, GroupAgreement, Membership

_DECIDED_MOST = 2  # what runs, and the one after it


class LeaderAgreement(GroupAgreement):
    """The leader's protocol, on the leader's rank and on the others.

    Args:
        frontier: See `Agreement`.
        membership: The rank's.
        decider: The leader's, on its rank; None on the others.
    """

    def __init__(
        self, frontier: Frontier, membership: Membership, *, decider: "Decider | None"
    ) -> None:
        super().__init__(frontier, membership)
        self.leader: int = membership.members[0]
        self._decider = decider
        self._ahead: deque[Agreed] = deque()
        self._heard = 0

    def begin_step(
        self, step: int, microbatches: int, *, backward: bool, split: Collection[int]
    ) -> None:
        """See `Agreement`; the leader makes its first decision."""
        self._step = step
        self._ahead.clear()
        self._heard = 0
        if self._decider is not None:
            self._decider.begin_step(microbatches, backward=backward, split=split)
            self._decide()

    def end_step(self) -> None:
        """See `Agreement`."""
        self._ahead.clear()
        if self._decider is not None:
            self._decider.end_step()

    def arrived(self, edge: Edge, maker: TaskId) -> list[TaskId]:
        """Tell the leader, too."""
        reductions = super().arrived(edge, maker)
        if self._decider is None:
            self._send(self.leader, TpArrival(self._step, edge, maker, self._clock.now_s()))
        else:
            self._decider.arrived(self._rank, edge, maker, self._clock.now_s())
            self._decide()
        return reductions

    def on_message(self, source: int, message: AgreementMessage) -> None:
        """The leader hears of arrivals, the others of decisions."""
        self._check_member(source, message)
        match message:
            case TpArrival() if self._decider is not None:
                self._decider.arrived(source, message.edge, message.task, message.time_s)
                self._decide()
            case TpDecision() if source == self.leader and message.number == self._heard:
                decision = Decision(
                    message.task, None, len(self._frontier.arbiter.ready), (), Reason.DECIDED
                )
                self._take(Agreed(message.number, decision, message.ready_s))
            case _:
                raise ProtocolError(
                    f"{message} from rank {source} has no place here: rank {self.leader} leads, "
                    f"and decision {self._heard} is the next"
                )

    def choose(self) -> Decision:
        """The oldest decision that this rank has not begun."""
        self._decide()
        return self._ahead[0].decision if self._ahead else self._undecided()

    def commit(self, decision: Decision) -> Agreed:
        """Begin what was decided."""
        agreed = self._ahead.popleft()
        assert decision.task is not None
        assert decision.task == agreed.decision.task
        self._frontier.arbiter.follow(decision.task)
        return self._on_own_clock(agreed)

    def ungraded(self, forward: TaskId) -> list[TaskId]:
        """On every rank alike, so nobody is told."""
        reductions = super().ungraded(forward)
        if self._decider is not None:
            self._decider.frontier.ungraded(forward)
            self._decide()
        return reductions

    def finished(self, task: TaskId) -> None:  # noqa: ARG002 - one is as good as another
        """There may be room for another decision."""
        if self._decider is not None:
            self._decider.finished()
            self._decide()

    def summary(self) -> str:
        """Which decision is awaited."""
        if self._ahead or not self._frontier.arbiter.ready:
            return ""
        if self._decider is not None:
            return self._decider.summary()
        return f"waits for decision {self._heard} of rank {self.leader}"

    def _decide(self) -> None:
        if self._decider is None:
            return
        while (agreed := self._decider.decide()) is not None:
            task = agreed.decision.task
            assert task is not None
            for member in self._others:
                self._send(member, TpDecision(self._step, agreed.number, task, agreed.ready_s))
            self._take(agreed)

    def _take(self, agreed: Agreed) -> None:
        self._ahead.append(agreed)
        self._heard += 1
        self._changed()


class Decider:
    """The leader's mind: what all ranks of the group have, and what is decided.

    Args:
        frontier: Over the decided sequence.
        members: The ranks of the group.
        measured: The backpressure of the leader's rank as it runs, whose measurements count.
        ahead: Whether the next task may be decided before what runs is done. It may not where
            what that is measured to keep decides about the next.
        clock: The first rank's.

    Attributes:
        frontier: As given.
    """

    def __init__(
        self,
        frontier: Frontier,
        *,
        members: Collection[int],
        measured: Backpressure,
        ahead: bool,
        clock: SharedClock,
    ) -> None:
        self.frontier = frontier
        self._clock = clock
        self._was_held_back = False
        self._members = frozenset(members)
        self._measured = measured
        self._may_be_ahead = ahead
        self._arrivals = Arrivals()
        self._absent: dict[tuple[Edge, bool, int], set[int]] = {}
        self._number = 0

    def begin_step(self, microbatches: int, *, backward: bool, split: Collection[int]) -> None:
        """Start a step; see `ReadySet.begin_step`."""
        self.frontier.begin_step(microbatches, backward=backward, split=split, reduced={})
        self._decided_most = _DECIDED_MOST if backward and self._may_be_ahead else 1
        self._arrivals.clear()
        self._absent = defaultdict(lambda: set(self._members))
        self._number = self._unfinished = 0
        self._was_held_back = False

    def end_step(self) -> None:
        """Forget a step that may have failed."""
        self.frontier.end_step()

    def arrived(self, member: int, edge: Edge, maker: TaskId, time_s: float) -> None:
        """What `maker` made came to `member` then; once all have it, it counts.

        Raises:
            ProtocolError: If it came there before.
        """
        absent = self._absent[edge, maker.kind is TaskKind.F, maker.microbatch]
        if member not in absent:
            raise ProtocolError(f"what {maker} made came to rank {member} twice over {edge}")
        absent.remove(member)
        self._arrivals.note(edge, maker, time_s)
        if not absent:
            self.frontier.arrived(edge, maker)

    def decide(self) -> Agreed | None:
        """The next task, if one is to be decided now.

        A weight gradient fills a gap, so it is decided when nothing else is to be run; in an order
        that is executed as it stands, when it is its turn.
        """
        if self._unfinished >= self._decided_most:
            return None
        self.frontier.backpressure.keep_up_with(self._measured)
        arbiter = self.frontier.arbiter
        decision = arbiter.choose()
        task = decision.task
        if task is None:
            self._was_held_back = decision.reason is Reason.BACKPRESSURE
            return None
        if task.kind is TaskKind.W and self._unfinished and not arbiter.is_fixed:
            return None
        arbiter.commit(decision)
        self.frontier.completed(task)
        self._unfinished += 1
        self._number += 1
        ready_s = self._arrivals.last_s(task)
        if self._was_held_back:  # there is room for it since now
            ready_s, self._was_held_back = self._clock.now_s(), False
        return Agreed(self._number - 1, decision, ready_s)

    def finished(self) -> None:
        """A decided task is done on the leader's rank."""
        self._unfinished -= 1

    def summary(self) -> str:
        """What has come to some of the group only, in words."""
        some = [
            f"{'activation' if forward else 'gradient'} {microbatch} over {edge} is not on ranks "
            f"{', '.join(map(str, sorted(absent)))}"
            for (edge, forward, microbatch), absent in self._absent.items()
            if absent
        ]
        return "; ".join(some[:4])

"""How a rank comes to its next task: by its own choice, or as its tensor-parallel group agrees.

Ranks that compute a stage together enter collectives in the tasks they run, so all must run the
same tasks in the same order, or they wait for one another for ever. An `Agreement` stands between a
rank's frontier and whoever runs its tasks. It is handed its group's messages, and may send; it
knows neither tensors nor devices.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from rrfp_async.arbiter import Decision, Reason
from rrfp_async.bus.messages import AgreementMessage
from rrfp_async.clocks import SharedClock
from rrfp_async.errors import ProtocolError
from rrfp_async.frontier import Frontier
from rrfp_async.ids import Edge, TaskId, TaskKind

Send = Callable[[int, AgreementMessage], None]
"""Sends a message to a rank, at once."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """A task that a group has agreed on.

    Attributes:
        number: Of the decision within the step, from 0.
        decision: The choice.
        ready_s: When the last of the group had what the task needs from other ranks, and there
            was room for it under the limit, in seconds of the first rank's clock, once committed
            of this rank's; 0.0 if it needs nothing.
        retries: How often the group had been of several minds since the last decision.
    """

    number: int
    decision: Decision
    ready_s: float
    retries: int = 0


@dataclass(frozen=True, slots=True)
class AgreementReport:
    """What agreeing came to in a step, on one rank.

    Attributes:
        decisions: Tasks that were agreed on.
        wait_s: Seconds, summed over the tasks, from when a task's needs were met on every rank of
            the group and this rank's device was free until the task started here.
        retries: How often the group was of several minds.
    """

    decisions: int
    wait_s: float
    retries: int


class Agreement(ABC):
    """Settles which task a rank runs next, step after step.

    Args:
        frontier: The rank's own; begun and ended by its owner, moved on here by what arrives and
            by what is committed.
    """

    leader: int | None = None
    """The rank that decides for the group, if one does."""

    def __init__(self, frontier: Frontier) -> None:
        self._frontier = frontier

    @abstractmethod
    def begin_step(
        self, step: int, microbatches: int, *, backward: bool, split: Collection[int]
    ) -> None:
        """Start a step whose tasks the frontier has; see `ReadySet.begin_step`."""

    def end_step(self) -> None:  # noqa: B027 - nothing is kept where nothing is agreed
        """Forget a step that may have failed."""

    def arrived(self, edge: Edge, maker: TaskId) -> list[TaskId]:
        """What `maker` made has come to this rank; returns the reductions that may begin."""
        return self._frontier.arrived(edge, maker)

    @abstractmethod
    def on_message(self, source: int, message: AgreementMessage) -> None:
        """A rank of the group has said something.

        Raises:
            ProtocolError: If it has no place here.
        """

    @abstractmethod
    def choose(self) -> Decision:
        """What to run next; may be asked again and, until it is committed, changed."""

    @abstractmethod
    def commit(self, decision: Decision) -> Agreed | None:
        """It is run now, or next for sure; returns what the group agreed on, if it is one."""

    @property
    @abstractmethod
    def leaves_out(self) -> bool:
        """Whether a backward that would do nothing may be left out on this rank's own account."""

    def ungraded(self, forward: TaskId) -> list[TaskId]:
        """No gradient will come for a forward that has run; returns reductions that may begin."""
        return self._frontier.ungraded(forward)

    def finished(self, task: TaskId) -> None:  # noqa: B027 - not everyone wants to know
        """The device is done with `task`, and its results are on their way."""

    def summary(self) -> str:
        """What the rank waits for of its group, in words; empty if for nothing."""
        return ""


class OwnChoice(Agreement):
    """Of a rank that computes its stages alone: what its arbiter chooses, it runs."""

    def begin_step(
        self, step: int, microbatches: int, *, backward: bool, split: Collection[int]
    ) -> None:
        """Nothing is to be agreed."""

    def on_message(self, source: int, message: AgreementMessage) -> None:
        """Nobody has a say here."""
        raise ProtocolError(f"{message} from rank {source}, but this rank computes alone")

    def choose(self) -> Decision:
        """The arbiter's choice."""
        return self._frontier.arbiter.choose()

    def commit(self, decision: Decision) -> None:
        """See `Arbiter.commit`."""
        self._frontier.arbiter.commit(decision)

    @property
    def leaves_out(self) -> bool:
        """Nobody would wait for it."""
        return True


@dataclass(frozen=True, slots=True)
class Membership:
    """A rank's place in its group, and its ways to the others.

    Attributes:
        members: The ranks of the group, in the same order on each; the first leads, if one does.
        rank: This one.
        send: To another member.
        clock: The first rank's.
        changed: Called when `choose` may have another answer.
    """

    members: tuple[int, ...]
    rank: int
    send: Send
    clock: SharedClock
    changed: Callable[[], None]


class GroupAgreement(Agreement):
    """What both protocols do.

    Args:
        frontier: See `Agreement`.
        membership: The rank's.
    """

    def __init__(self, frontier: Frontier, membership: Membership) -> None:
        super().__init__(frontier)
        members, rank = membership.members, membership.rank
        self._members = members
        self._rank = rank
        self._others = tuple(member for member in members if member != rank)
        self._send = membership.send
        self._clock = membership.clock
        self._changed = membership.changed
        self._step = 0

    @property
    def leaves_out(self) -> bool:
        """It is for the group to say what runs: an empty backward takes its turn."""
        return False

    def _check_member(self, source: int, message: AgreementMessage) -> None:
        if source not in self._others:
            raise ProtocolError(f"{message} from rank {source}: its group is not {self._members}")

    def _on_own_clock(self, agreed: Agreed) -> Agreed:
        if not agreed.ready_s:
            return agreed
        return replace(agreed, ready_s=self._clock.own_s(agreed.ready_s))

    def _undecided(self) -> Decision:
        """That nothing runs; if that is for want of agreement only, what this rank would run."""
        decision = self._frontier.arbiter.choose()
        if decision.task is None:
            return decision
        first = (decision.task, *decision.passed_over)
        return replace(
            decision, task=None, hint_position=None, passed_over=first, reason=Reason.UNDECIDED
        )


class Arrivals:
    """When what tasks need from other ranks was there."""

    def __init__(self) -> None:
        self._last_s: defaultdict[tuple[int, bool, int], float] = defaultdict(float)

    def clear(self) -> None:
        """Forget the step."""
        self._last_s.clear()

    def note(self, edge: Edge, maker: TaskId, time_s: float) -> None:
        """What `maker` made was there then."""
        forward = maker.kind is TaskKind.F
        key = (edge.target if forward else edge.source, forward, maker.microbatch)
        self._last_s[key] = max(self._last_s[key], time_s)

    def last_s(self, task: TaskId) -> float:
        """When the last thing that `task` needs was there; 0.0 if it needs none."""
        if task.kind is TaskKind.W:
            return 0.0
        return self._last_s.get((task.stage, task.kind is TaskKind.F, task.microbatch), 0.0)

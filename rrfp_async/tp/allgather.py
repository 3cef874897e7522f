"""Every rank proposes its own choice, and what all propose is run: the RRFP paper's protocol.

A rank whose device is free tells the whole group what it would run. If all say the same, all run
it. Else nobody does, nothing has moved, and they try again once the ready set of one of them has
changed. It is here to be compared with `leader`, which needs neither the round trip nor retries.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

from rrfp_async.arbiter import Decision
from rrfp_async.bus.messages import AgreementMessage, TpProposal
from rrfp_async.errors import ProtocolError
from rrfp_async.frontier import Frontier
from rrfp_async.ids import Edge, TaskId
from rrfp_async.tp.agreement import Agreed, Arrivals, GroupAgreement, Membership


class AllgatherAgreement(GroupAgreement):
    """One rank of a group without a leader. See `GroupAgreement` for the arguments.

    It relies on equal arbiters: with equal ready sets all ranks choose the same. So a limit that
    follows what a rank measures is none for it.
    """

    def __init__(self, frontier: Frontier, membership: Membership) -> None:
        super().__init__(frontier, membership)
        self._arrivals = Arrivals()
        self.end_step()

    def begin_step(
        self,
        step: int,
        microbatches: int,  # noqa: ARG002 - the frontier knows
        *,
        backward: bool,  # noqa: ARG002
        split: Collection[int],  # noqa: ARG002
    ) -> None:
        """See `Agreement`."""
        self.end_step()
        self._step = step

    def end_step(self) -> None:
        """See `Agreement`."""
        self._rounds: defaultdict[int, dict[int, TpProposal]] = defaultdict(dict)
        self._round = self._number = self._retries = self._unfinished = 0
        self._proposed: Decision | None = None
        self._failed: Decision | None = None
        self._agreed: Agreed | None = None
        self._arrivals.clear()

    def arrived(self, edge: Edge, maker: TaskId) -> list[TaskId]:
        """Note when."""
        self._arrivals.note(edge, maker, self._clock.now_s())
        return super().arrived(edge, maker)

    def on_message(self, source: int, message: AgreementMessage) -> None:
        """Another rank's proposal for this round, or already for the next."""
        self._check_member(source, message)
        if not isinstance(message, TpProposal) or not (
            self._round <= message.round <= self._round + 1
            and source not in self._rounds[message.round]
        ):
            raise ProtocolError(
                f"{message} from rank {source} has no place here: round {self._round} is under way"
            )
        self._rounds[message.round][source] = message
        self._compare()
        self._changed()

    def choose(self) -> Decision:
        """What all have proposed; if this rank's device is free and has not yet, it proposes."""
        if self._agreed is None and not self._unfinished:
            self._propose()
        return self._undecided() if self._agreed is None else self._agreed.decision

    def commit(self, decision: Decision) -> Agreed:
        """Run what was agreed on."""
        agreed = self._agreed
        assert agreed is not None
        assert agreed.decision == decision
        self._frontier.arbiter.commit(decision)
        self._agreed = self._failed = None
        self._retries = 0
        self._number += 1
        self._unfinished += 1
        return self._on_own_clock(agreed)

    def finished(self, task: TaskId) -> None:  # noqa: ARG002 - one is as good as another
        """The device is free, if that was all."""
        self._unfinished -= 1

    def summary(self) -> str:
        """Whose proposal is awaited."""
        if self._proposed is None:
            return ""
        silent = [rank for rank in self._others if rank not in self._rounds[self._round]]
        return f"has proposed {self._proposed.task}; ranks {silent} have not proposed anything"

    def _propose(self) -> None:
        """Say what this rank would run, unless it has, or it knows nothing new to say."""
        while self._proposed is None:
            decision = self._frontier.arbiter.choose()
            nothing_new = self._failed is not None and (
                (decision.task, decision.ready) == (self._failed.task, self._failed.ready)
            )
            if decision.task is None or (nothing_new and not self._rounds[self._round]):
                return
            self._proposed = decision
            ready_s = self._arrivals.last_s(decision.task)
            proposal = TpProposal(self._step, self._round, decision.task, ready_s)
            self._rounds[self._round][self._rank] = proposal
            for member in self._others:
                self._send(member, proposal)
            self._compare()
            if self._agreed is not None:
                return

    def _compare(self) -> None:
        """Once all have proposed, the round is over."""
        proposals = self._rounds[self._round]
        if len(proposals) < len(self._members) or self._proposed is None:
            return
        del self._rounds[self._round]
        self._round += 1
        decision, self._proposed = self._proposed, None
        if len({proposal.task for proposal in proposals.values()}) == 1:
            ready_s = max(proposal.ready_s for proposal in proposals.values())
            self._agreed = Agreed(self._number, decision, ready_s, self._retries)
        else:
            self._failed = replace(decision, passed_over=())
            self._retries += 1

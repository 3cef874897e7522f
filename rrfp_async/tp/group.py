"""The agreement that a rank's topology and settings ask for."""

from collections.abc import Callable

from rrfp_async.clocks import SharedClock
from rrfp_async.config import Config
from rrfp_async.frontier import Frontier
from rrfp_async.grid import coordinates, tp_group
from rrfp_async.topology import Topology
from rrfp_async.tp.agreement import Agreement, Membership, OwnChoice, Send
from rrfp_async.tp.allgather import AllgatherAgreement
from rrfp_async.tp.leader import Decider, LeaderAgreement


def make_agreement(
    frontier: Frontier,
    *,
    topology: Topology,
    rank: int,
    config: Config,
    send: Send,
    clock: SharedClock,
    changed: Callable[[], None],
) -> Agreement:
    """How `rank` comes to its next task.

    Args:
        frontier: The rank's own.
        topology: All ranks'.
        rank: Which.
        config: The protocol, and what a leader's own frontier needs.
        send: To another rank.
        clock: The first rank's.
        changed: Called when there may be another choice.
    """
    members = tp_group(topology, rank)
    if len(members) == 1:
        return OwnChoice(frontier)
    membership = Membership(members, rank, send, clock, changed)
    if config.tp_protocol == "allgather":
        return AllgatherAgreement(frontier, membership)
    decider = None
    if rank == members[0]:
        decider = Decider(
            Frontier(topology, coordinates(topology, rank).pp, config, limit=frontier.limit),
            members=members,
            measured=frontier.backpressure,
            ahead=config.activation_budget_bytes is None,
            clock=clock,
        )
    return LeaderAgreement(frontier, membership, decider=decider)

"""What tasks are found to wait for: the end of the chain, where another rank's work begins."""

from rrfp_async.grid import Column
from rrfp_async.hints import Admissible
from rrfp_async.ids import Edge, TaskId
from rrfp_async.ready_set import ReadySet
from rrfp_async.topology import Topology
from rrfp_async.trace.waiting import Waiting

EVERY = Admissible(any_forward=True)
NO_FORWARD = Admissible(any_forward=False)


def told(
    words: str,
    ready_set: ReadySet,
    topology: Topology,
    rank: int = 1,
    *,
    admissible: Admissible = EVERY,
    splits: bool = False,
) -> list[str]:
    """The waits of the tasks as words."""
    waiting = Waiting(ready_set, Column.of(topology, rank), rank, splits=splits)
    found = waiting.of(map(TaskId.parse, words.split()), admissible)
    return [f"{w.task} for {w.lack.value} {w.of} over {w.edge} from {w.rank}" for w in found]


def middle(microbatches: int = 3, *, deterministic: bool = True) -> tuple[ReadySet, Topology]:
    """Rank 1 of a chain of three at the beginning of a step."""
    topology = Topology(3)
    ready_set = ReadySet(topology, 1, deterministic=deterministic)
    ready_set.begin_step(microbatches, backward=True)
    return ready_set, topology


def test_a_backward_without_its_forward_waits_for_the_activation() -> None:
    """Its gradient could not come before; each wait is told once."""
    ready_set, topology = middle()
    waits = told("1B0 1B1", ready_set, topology)
    assert waits == [
        "1F0 for activation 0F0 over 0->1 from 0",
        "1F1 for activation 0F1 over 0->1 from 0",
    ]


def test_a_backward_whose_forward_has_run_waits_for_the_gradient() -> None:
    """And the one behind it in microbatch order, for that."""
    ready_set, topology = middle()
    for microbatch in range(2):
        ready_set.activation_arrived(Edge(0, 1), microbatch)
        ready_set.completed(TaskId.parse(f"1F{microbatch}"))
    waits = told("1B0 1B1 1F2", ready_set, topology)
    assert waits == [
        "1B0 for gradient 2B0 over 1->2 from 2",
        "1F2 for activation 0F2 over 0->1 from 0",
    ]


def test_without_an_order_every_backward_waits_for_its_own_gradient() -> None:
    """B1 hangs on nothing of this rank; where the hint splits, I makes gradients."""
    ready_set, topology = middle(deterministic=False)
    for microbatch in range(2):
        ready_set.activation_arrived(Edge(0, 1), microbatch)
        ready_set.completed(TaskId.parse(f"1F{microbatch}"))
    assert told("1B0 1B1", ready_set, topology, splits=True) == [
        "1B0 for gradient 2I0 over 1->2 from 2",
        "1B1 for gradient 2I1 over 1->2 from 2",
    ]


def test_what_is_not_admissible_is_waited_for_by_nobody() -> None:
    """At the limit, another activation would not help; the gradient would."""
    ready_set, topology = middle()
    ready_set.activation_arrived(Edge(0, 1), 0)
    ready_set.completed(TaskId.parse("1F0"))
    waits = told("1F1 1F2 1B0", ready_set, topology, admissible=NO_FORWARD)
    assert waits == ["1B0 for gradient 2B0 over 1->2 from 2"]


def test_a_task_behind_a_ready_one_that_is_held_back_waits_for_that() -> None:
    """As in a fixed order, whose next task hangs on one that is not its turn."""
    ready_set, topology = middle()
    ready_set.activation_arrived(Edge(0, 1), 0)
    assert told("1F0 1B0", ready_set, topology) == []
    assert told("1B0", ready_set, topology) == ["1B0 for task 1F0 over None from 1"]


def test_at_most_four_waits_are_told_the_best_first() -> None:
    """Of six missing activations."""
    ready_set, topology = middle(6)
    waits = told("1F5 1F4 1F3 1F2 1F1 1F0", ready_set, topology)
    assert [wait[:3] for wait in waits] == ["1F5", "1F4", "1F3", "1F2"]


def test_a_chunk_that_waits_for_another_of_its_rank_waits_for_what_that_waits_for() -> None:
    """In a V the last two stages are one rank's: nothing arrives between them."""
    topology = Topology(2, chunks=2, placement="v")
    ready_set = ReadySet(topology, 1, deterministic=True)
    ready_set.begin_step(1, backward=True)
    assert told("2F0", ready_set, topology) == ["1F0 for activation 0F0 over 0->1 from 0"]
    ready_set.activation_arrived(Edge(0, 1), 0)
    ready_set.completed(TaskId.parse("1F0"))
    ready_set.activation_arrived(Edge(1, 2), 0)
    ready_set.completed(TaskId.parse("2F0"))
    assert told("1B0", ready_set, topology) == ["2B0 for gradient 3B0 over 2->3 from 0"]


def test_of_several_in_edges_those_are_told_that_are_missing() -> None:
    """A stage with two sources waits for the one that has not come."""
    topology = Topology(3, edges=[Edge(0, 2), Edge(1, 2)])
    ready_set = ReadySet(topology, 2, deterministic=True)
    ready_set.begin_step(1, backward=True)
    assert told("2F0", ready_set, topology, 2) == [
        "2F0 for activation 0F0 over 0->2 from 0",
        "2F0 for activation 1F0 over 1->2 from 1",
    ]
    ready_set.activation_arrived(Edge(0, 2), 0)
    assert told("2F0", ready_set, topology, 2) == ["2F0 for activation 1F0 over 1->2 from 1"]


def test_the_rank_named_is_of_the_same_pipeline() -> None:
    """With two replicas, rank 3 waits for its own column's rank, not for stage 0's first."""
    topology = Topology(2, dp=2)
    ready_set = ReadySet(topology, 1, deterministic=True)
    ready_set.begin_step(1, backward=True)
    waits = told("1F0", ready_set, topology, 3)
    assert waits == ["1F0 for activation 0F0 over 0->1 from 1"]

"""Readiness: a task is ready once, and only when its last need is met."""

import pytest

from rrfp_async.errors import ProtocolError
from rrfp_async.ids import Edge
from rrfp_async.ready_set import Activation, Gradient, ReadySet
from rrfp_async.topology import Topology
from tests.core.words import task, words

JOIN = Topology(4, (Edge(0, 2), Edge(1, 2), Edge(2, 3), Edge(0, 3)))
"""Stages 0 and 1 join in 2; 0 also skips to 3."""


def started(
    topology: Topology,
    rank: int,
    microbatches: int,
    *,
    deterministic: bool = True,
    backward: bool = True,
) -> ReadySet:
    ready_set = ReadySet(topology, rank, deterministic=deterministic)
    ready_set.begin_step(microbatches, backward=backward)
    return ready_set


def test_a_step_lists_every_task_of_the_rank_once() -> None:
    """The arbiter is told of each F and B of this rank's stage, and of no other."""
    ready_set = ReadySet(Topology(3), 1, deterministic=True)
    step = ready_set.begin_step(3, backward=True)
    assert sorted(map(str, step)) == ["1B0", "1B1", "1B2", "1F0", "1F1", "1F2"]
    assert ready_set.remaining == 6


def test_only_sources_have_ready_tasks_when_a_step_begins() -> None:
    """A source's inputs are at hand; every other stage waits for an arrival."""
    assert words(started(Topology(2), 0, 3).ready_now()) == "0F0 0F1 0F2"
    assert started(Topology(2), 1, 3).ready_now() == []


def test_a_forward_waits_for_every_edge_in() -> None:
    """Arrivals come in any order, and a microbatch needs only its own."""
    ready_set = started(JOIN, 2, 2)
    assert ready_set.activation_arrived(Edge(1, 2), 1) == []
    assert ready_set.activation_arrived(Edge(0, 2), 0) == []
    assert ready_set.activation_arrived(Edge(0, 2), 1) == [task("2F1")]
    assert ready_set.activation_arrived(Edge(1, 2), 0) == [task("2F0")]
    assert words(ready_set.ready_now()) == "2F0 2F1"


def test_a_backward_waits_for_every_edge_out_and_its_own_forward() -> None:
    """Neither gradient is enough, nor are both without the forward."""
    ready_set = started(JOIN, 0, 1)
    assert ready_set.gradient_arrived(Edge(0, 3), 0) == []
    assert ready_set.gradient_arrived(Edge(0, 2), 0) == []
    assert ready_set.completed(task("0F0")) == [task("0B0")]


def test_on_the_last_stage_a_forward_makes_its_backward_ready() -> None:
    """There is no edge out, so no message is waited for (PAPER 3)."""
    ready_set = started(Topology(1), 0, 2)
    assert ready_set.completed(task("0F0")) == [task("0B0")]


def test_ordered_accumulation_makes_a_backward_wait_for_the_one_before() -> None:
    """With `deterministic` B1 becomes ready by B0, not by its own forward."""
    ready_set = started(Topology(1), 0, 3)
    assert ready_set.completed(task("0F2")) == []
    assert ready_set.completed(task("0F1")) == []
    assert ready_set.missing(task("0B1")) == {task("0B0")}
    assert ready_set.completed(task("0F0")) == [task("0B0")]
    assert ready_set.completed(task("0B0")) == [task("0B1")]
    assert ready_set.completed(task("0B1")) == [task("0B2")]


def test_free_accumulation_lets_backwards_overtake() -> None:
    """Without `deterministic` a backward waits for nothing of another microbatch."""
    ready_set = started(Topology(1), 0, 3, deterministic=False)
    assert ready_set.completed(task("0F2")) == [task("0B2")]
    assert ready_set.completed(task("0B2")) == []


def test_a_forward_only_step_has_no_backwards() -> None:
    """No gradient is expected, and a forward makes nothing ready here."""
    ready_set = started(Topology(2), 0, 2, backward=False)
    assert ready_set.remaining == 2
    assert not ready_set.expects_gradient(Edge(0, 1), 0)
    assert ready_set.completed(task("0F0")) == []
    with pytest.raises(ProtocolError):
        ready_set.gradient_arrived(Edge(0, 1), 0)


def test_an_arrival_that_came_twice_is_an_error() -> None:
    """The error names the edge and the microbatch, and the step is as it was."""
    ready_set = started(Topology(3), 1, 2)
    ready_set.activation_arrived(Edge(0, 1), 1)
    with pytest.raises(ProtocolError, match=r"0->1.*microbatch=1.*came twice"):
        ready_set.activation_arrived(Edge(0, 1), 1)
    ready_set.gradient_arrived(Edge(1, 2), 0)
    with pytest.raises(ProtocolError, match=r"1->2.*microbatch=0.*came twice"):
        ready_set.gradient_arrived(Edge(1, 2), 0)
    assert words(ready_set.ready_now()) == "1F1"


@pytest.mark.parametrize(
    ("edge", "microbatch"), [(Edge(1, 2), 0), (Edge(0, 1), 2), (Edge(0, 2), 0)]
)
def test_an_arrival_for_no_task_of_the_step_is_an_error(edge: Edge, microbatch: int) -> None:
    """Another stage's edge, a microbatch past the last, and an edge that does not exist."""
    with pytest.raises(ProtocolError, match="no task of this step"):
        started(Topology(3), 1, 2).activation_arrived(edge, microbatch)


def test_an_arrival_is_expected_until_it_comes() -> None:
    """The two directions of an edge are kept apart."""
    ready_set = started(Topology(3), 1, 1)
    assert ready_set.expects_activation(Edge(0, 1), 0)
    assert not ready_set.expects_gradient(Edge(0, 1), 0)
    assert ready_set.expects_gradient(Edge(1, 2), 0)
    ready_set.activation_arrived(Edge(0, 1), 0)
    assert not ready_set.expects_activation(Edge(0, 1), 0)
    assert ready_set.missing(task("1B0")) == {Gradient(Edge(1, 2), 0), task("1F0")}


@pytest.mark.parametrize(
    ("word", "why"), [("1F1", "waiting for"), ("1F9", "unknown"), ("0F0", "unknown")]
)
def test_a_task_that_was_not_ready_cannot_complete(word: str, why: str) -> None:
    """A completion out of the blue is an error that names the task and changes nothing."""
    ready_set = started(Topology(3), 1, 2)
    ready_set.activation_arrived(Edge(0, 1), 0)
    with pytest.raises(ProtocolError, match=f"{word} completed, but it was .*{why}"):
        ready_set.completed(task(word))
    assert ready_set.remaining == 4


def test_a_task_cannot_complete_twice() -> None:
    """The second completion is an error, also where something waited for the first."""
    ready_set = started(Topology(1), 0, 1)
    ready_set.completed(task("0F0"))
    with pytest.raises(ProtocolError, match=r"0F0 completed, but it was .*completed before"):
        ready_set.completed(task("0F0"))


def test_a_step_cannot_begin_inside_another() -> None:
    """The error says what is left and what it waits for; `reset` gives the step up."""
    ready_set = started(Topology(3), 1, 1)
    with pytest.raises(ProtocolError, match=r"2 tasks have not completed: 1F0 waits for .*0->1"):
        ready_set.begin_step(1, backward=True)
    ready_set.reset()
    assert ready_set.remaining == 0
    assert not ready_set.expects_activation(Edge(0, 1), 0)
    assert len(ready_set.begin_step(2, backward=True)) == 4


def test_the_same_arrivals_are_expected_anew_in_the_next_step() -> None:
    """Nothing of a completed step stays behind."""
    ready_set = ReadySet(Topology(2), 0, deterministic=True)
    for microbatches in (2, 1, 3):
        step = ready_set.begin_step(microbatches, backward=True)
        assert len(step) == 2 * microbatches
        for microbatch in range(microbatches):
            ready_set.completed(task(f"0F{microbatch}"))
            ready_set.gradient_arrived(Edge(0, 1), microbatch)
            ready_set.completed(task(f"0B{microbatch}"))
        assert ready_set.remaining == 0


def test_the_summary_shows_at_most_what_it_is_asked_for() -> None:
    """A step of many tasks still fits in an error message, and the count is the whole."""
    ready_set = started(Topology(1), 0, 30)
    summary = ready_set.summary(most=2)
    assert "60 tasks" in summary
    assert summary.count("waits for") == 2
    assert "0F0 waits for its turn" in summary


def test_what_a_task_misses_is_a_copy() -> None:
    """Asking what a task waits for cannot change it."""
    ready_set = started(Topology(2), 1, 1)
    assert ready_set.missing(task("1F0")) == {Activation(Edge(0, 1), 0)}
    assert isinstance(ready_set.missing(task("1F0")), frozenset)
    assert ready_set.missing(task("0F0")) == frozenset()


def test_a_reduction_waits_for_its_stages_gradients_and_for_other_reductions() -> None:
    """On a rank with two stages: the higher's, a tied one that concerns both, the lower's."""
    ready_set = ReadySet(Topology(1, chunks=2), 0, deterministic=True)
    high, low, tied = task("1R1"), task("0R1"), task("0R0")
    reduced = {tied: (0, 1), high: (1, tied), low: (0, tied, high)}
    ready_set.begin_step(1, backward=True, reduced=reduced)
    ready_set.completed(task("0F0"))
    ready_set.activation_arrived(Edge(0, 1), 0)
    ready_set.completed(task("1F0"))
    assert ready_set.completed(task("1B0")) == []
    assert ready_set.missing(high) == {tied}
    ready_set.gradient_arrived(Edge(0, 1), 0)
    assert ready_set.completed(task("0B0")) == [tied]
    assert ready_set.completed(tied) == [high]
    assert ready_set.completed(high) == [low]
    ready_set.completed(low)
    assert ready_set.remaining == 0

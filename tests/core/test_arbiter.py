"""The choice: best in the hint order among what is ready and admissible, and why."""

from collections.abc import Sequence

import pytest

from rrfp_async.arbiter import PASSED_OVER_MOST, Arbiter, Decision, Reason
from rrfp_async.backpressure import Backpressure
from rrfp_async.errors import ProtocolError
from rrfp_async.hints import Admissible, HintOrder, RankedHint, resolve_hint
from rrfp_async.ids import TaskId
from rrfp_async.limits import FixedLimit
from tests.core.words import task, tasks, words


class Listed(RankedHint):
    """Ranks by a list of words."""

    def __init__(self, listed: str) -> None:
        super().__init__()
        self._places = {each: place for place, each in enumerate(tasks(listed))}

    def rank(self, task: TaskId) -> int:
        return self._places[task]


class Unlisted(HintOrder):
    """The least a hint order can be: the last task that became ready, no positions."""

    def begin_step(self, tasks: Sequence[TaskId]) -> None:
        self._ready: list[TaskId] = []

    def add(self, task: TaskId) -> None:
        self._ready.append(task)

    def peek(self, admissible: Admissible) -> TaskId | None:
        return next(filter(admissible, reversed(self._ready)), None)

    def commit(self, task: TaskId) -> None:
        self._ready.remove(task)


def arbiter_of(hint: HintOrder, step: str, *, limit: int = 8) -> tuple[Arbiter, Backpressure]:
    """An arbiter in a training step of the tasks `step`, none of them ready."""
    backpressure = Backpressure(FixedLimit(limit))
    arbiter = Arbiter(hint, backpressure)
    arbiter.begin_step(tasks(step))
    return arbiter, backpressure


def listed(order: str, *, limit: int = 8) -> tuple[Arbiter, Backpressure]:
    return arbiter_of(Listed(order), order, limit=limit)


def test_without_a_ready_task_there_is_no_choice() -> None:
    """The decision says so and passes nothing over."""
    arbiter, _ = listed("0F0 0B0")
    assert arbiter.choose() == Decision(None, None, 0, (), Reason.NOTHING_READY)


def test_the_highest_ranked_ready_task_is_chosen() -> None:
    """First in the list and ready: nothing is passed over."""
    arbiter, _ = listed("0F1 0F0 0B1 0B0")
    arbiter.add(tasks("0F0 0F1"))
    assert arbiter.choose() == Decision(task("0F1"), 0, 2, (), Reason.FIRST)


def test_a_ready_task_is_chosen_before_a_higher_one_that_is_not_ready() -> None:
    """Readiness first: the order ranks and never makes a rank wait."""
    arbiter, _ = listed("0F1 0B1 0F0 0B0")
    arbiter.add(tasks("0F0"))
    assert arbiter.choose() == Decision(
        task("0F0"), 2, 1, tuple(tasks("0F1 0B1")), Reason.READY_FIRST
    )


def test_a_forward_that_is_held_back_is_passed_over() -> None:
    """A ready forward that is not admissible counts among the passed over, with the unready."""
    arbiter, backpressure = listed("0F2 0F1 0B0 0F0 0B1 0B2", limit=2)
    backpressure.decided(task("0F2"))
    arbiter.add(tasks("0F1 0F0"))
    decision = arbiter.choose()
    assert decision.task == task("0F0")
    assert words(decision.passed_over) == "0F2 0F1 0B0"
    assert decision.ready == 2


def test_a_dispatched_task_is_not_passed_over() -> None:
    """What ran already is no reason for anything."""
    arbiter, _ = listed("0F2 0F1 0F0 0B0 0B1 0B2")
    arbiter.add(tasks("0F2 0F0"))
    arbiter.commit(arbiter.choose())
    assert words(arbiter.choose().passed_over) == "0F1"


def test_forwards_at_the_limit_are_held_back_and_the_decision_says_so() -> None:
    """Ready tasks but no choice: the reason is backpressure, not idleness."""
    arbiter, _ = listed("0F1 0F0 0B0 0B1", limit=1)
    arbiter.add(tasks("0F0 0F1"))
    first = arbiter.choose()
    assert first.task == task("0F0")
    arbiter.commit(first)
    held = arbiter.choose()
    assert (held.task, held.hint_position, held.ready) == (None, None, 1)
    assert held.reason is Reason.BACKPRESSURE
    assert words(held.passed_over) == "0F1 0B0 0B1"


@pytest.mark.parametrize("most", [0, 1, 7, 8, 9, 30])
def test_a_decision_lists_the_first_eight_that_were_passed_over(most: int) -> None:
    """At most eight, and of more the highest-ranked eight."""
    forwards = [f"0F{microbatch}" for microbatch in range(most)]
    arbiter, _ = listed(" ".join([*forwards, "0B0"]))
    arbiter.add([task("0B0")])
    decision = arbiter.choose()
    assert PASSED_OVER_MOST == 8
    assert words(decision.passed_over) == " ".join(forwards[:8])
    assert decision.hint_position == most


def test_a_round_passes_over_the_direction_whose_turn_it_was() -> None:
    """Rounds have no positions, but they say what they would rather have run."""
    arbiter, _ = arbiter_of(resolve_hint("bf"), "0F0 0F1 0B0 0B1")
    arbiter.add(tasks("0F1"))
    decision = arbiter.choose()
    assert decision == Decision(task("0F1"), None, 1, tuple(tasks("0B0 0B1 0F0")), decision.reason)
    assert decision.reason is Reason.READY_FIRST


def test_choosing_changes_nothing() -> None:
    """However often it is asked, the arbiter answers the same until something happens."""
    arbiter, backpressure = arbiter_of(resolve_hint("bf"), "0F0 0F1 0B0 0B1")
    arbiter.add(tasks("0F0 0F1 0B0"))
    first = arbiter.choose()
    assert first.task == task("0B0")
    assert all(arbiter.choose() == first for _ in range(3))
    assert backpressure.in_flight == 0
    arbiter.commit(first)
    assert arbiter.choose().task == task("0F0")


def test_committing_a_forward_takes_its_place_at_once() -> None:
    """D counts decided forwards, not completed ones; a backward takes no place."""
    arbiter, backpressure = listed("0F0 0B0")
    arbiter.add(tasks("0F0"))
    arbiter.commit(arbiter.choose())
    assert backpressure.in_flight == 1
    arbiter.add(tasks("0B0"))
    arbiter.commit(arbiter.choose())
    assert backpressure.in_flight == 1


def test_a_decision_cannot_be_committed_twice() -> None:
    """A stale decision is an error that names its task, and it changes nothing."""
    arbiter, backpressure = listed("0F0 0F1 0B0 0B1")
    arbiter.add(tasks("0F0 0F1"))
    stale = arbiter.choose()
    arbiter.commit(stale)
    with pytest.raises(ProtocolError, match=r"0F0.*not ready"):
        arbiter.commit(stale)
    assert backpressure.in_flight == 1
    assert arbiter.choose().task == task("0F1")


def test_a_decision_of_the_last_step_cannot_be_committed() -> None:
    """A new step forgets what was ready in the one before."""
    arbiter, _ = listed("0F0 0F1")
    arbiter.add(tasks("0F0 0F1"))
    stale = arbiter.choose()
    arbiter.begin_step(tasks("0F0 0F1"))
    with pytest.raises(ProtocolError, match="not ready"):
        arbiter.commit(stale)
    assert arbiter.choose().reason is Reason.NOTHING_READY


def test_a_decision_without_a_task_cannot_be_committed() -> None:
    """There is nothing to carry out."""
    arbiter, _ = listed("0F0")
    with pytest.raises(ProtocolError, match="cannot be committed"):
        arbiter.commit(arbiter.choose())


def test_an_order_that_is_no_list_needs_neither_positions_nor_ahead_of() -> None:
    """The four abstract methods of a HintOrder are enough to be arbitrated."""
    arbiter, _ = arbiter_of(Unlisted(), "0F0 0F1 0F2 0B0 0B1 0B2", limit=2)
    arbiter.add(tasks("0F0 0F1 0F2"))
    first = arbiter.choose()
    assert first == Decision(task("0F2"), None, 3, (), Reason.FIRST)
    arbiter.commit(first)
    assert arbiter.choose().task == task("0F0")


def test_a_decision_whose_room_was_taken_meanwhile_cannot_be_committed() -> None:
    """Of two decisions made at the same state, the second must not take the place kept for u."""
    arbiter, _ = listed("0F2 0F1 0F0 0B0 0B1 0B2", limit=2)
    arbiter.add(tasks("0F1"))
    first = arbiter.choose()
    arbiter.add(tasks("0F2"))
    arbiter.commit(arbiter.choose())
    with pytest.raises(ProtocolError, match="no room for its task"):
        arbiter.commit(first)


@pytest.mark.parametrize("word", ["0F0", "0F1", "7F7"])
def test_a_task_that_is_not_to_come_cannot_become_ready(word: str) -> None:
    """Ready already, dispatched already, or of no step: an error, and nothing has changed."""
    arbiter, _ = listed("0F0 0F1 0B0 0B1")
    arbiter.add(tasks("0F0"))
    arbiter.commit(arbiter.choose())
    arbiter.add(tasks("0F1"))
    with pytest.raises(ProtocolError, match=word):
        arbiter.add(tasks(word))
    assert arbiter.choose().ready == 1

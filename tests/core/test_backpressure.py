"""Backpressure: how many forwards may be in flight, and whose turn the last place is."""

import pytest

from rrfp_async.backpressure import Backpressure
from rrfp_async.errors import ProtocolError
from rrfp_async.hints import Admissible
from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.limits import FixedLimit
from tests.core.words import task, tasks, words


def begun(
    limit: int, microbatches: int = 8, *, chunks: int = 1, backward: bool = True
) -> Backpressure:
    backpressure = Backpressure(FixedLimit(limit), chunks=chunks)
    backpressure.begin_step(microbatches, backward=backward)
    return backpressure


def decide(backpressure: Backpressure, listed: str) -> None:
    for each in tasks(listed):
        assert backpressure.admissible()(each), f"{each} is not admissible"
        backpressure.decided(each)


def admitted(backpressure: Backpressure, microbatches: int = 8) -> str:
    """The forwards of stage 0 that are admissible, as words."""
    forwards = [TaskId(0, TaskKind.F, microbatch) for microbatch in range(microbatches)]
    return words(filter(backpressure.admissible(), forwards))


@pytest.mark.parametrize("kind", [kind for kind in TaskKind if kind is not TaskKind.F])
@pytest.mark.parametrize("microbatch", [0, 1, 7])
def test_everything_but_a_forward_is_always_admissible(kind: TaskKind, microbatch: int) -> None:
    """At the bound, and with every kind of Admissible there is."""
    other = TaskId(0, kind, microbatch)
    backpressure = begun(1)
    assert backpressure.admissible()(other)
    decide(backpressure, "0F0")
    assert backpressure.admissible()(other)
    assert Admissible(any_forward=False, forward_microbatch=None)(other)


def test_below_the_last_place_every_forward_is_admissible() -> None:
    """With limit 3 the first two places are anyone's."""
    backpressure = begun(3)
    assert admitted(backpressure, 4) == "0F0 0F1 0F2 0F3"
    decide(backpressure, "0F5")
    assert admitted(backpressure, 4) == "0F0 0F1 0F2 0F3"


def test_the_last_place_is_kept_for_the_oldest_microbatch() -> None:
    """It is for u, the lowest microbatch whose forward was not decided, whatever went before."""
    backpressure = begun(3)
    decide(backpressure, "0F5 0F3")
    assert admitted(backpressure) == "0F0"
    decide(backpressure, "0F0")
    assert admitted(backpressure) == ""


def test_the_oldest_microbatch_moves_past_those_that_were_decided_early() -> None:
    """After 0, 1 and 2 went out of order, u is 3."""
    backpressure = begun(4)
    decide(backpressure, "0F2 0F1 0F0")
    assert admitted(backpressure) == "0F3"


def test_limit_one_admits_one_microbatch_after_the_other() -> None:
    """With a single place the order is fixed: taking F1 first could never accumulate B0."""
    backpressure = begun(1, 3)
    for microbatch in range(3):
        assert admitted(backpressure, 3) == f"0F{microbatch}"
        decide(backpressure, f"0F{microbatch}")
        assert admitted(backpressure, 3) == ""
        backpressure.completed(task(f"0F{microbatch}"))
        assert admitted(backpressure, 3) == ""
        backpressure.completed(task(f"0B{microbatch}"))
    assert admitted(backpressure, 3) == ""
    assert backpressure.peak == 1


def test_a_place_is_taken_by_the_decision_and_freed_by_the_backward_that_completed() -> None:
    """D counts from the moment a forward is chosen until its gradient is accumulated."""
    backpressure = begun(2)
    decide(backpressure, "0F0")
    assert backpressure.in_flight == 1
    backpressure.completed(task("0F0"))
    assert backpressure.in_flight == 1
    decide(backpressure, "0B0")
    assert backpressure.in_flight == 1
    backpressure.completed(task("0B0"))
    assert backpressure.in_flight == 0


def test_the_peak_is_the_largest_count_of_the_step() -> None:
    """It stays when places are freed and starts anew with a step."""
    backpressure = begun(4)
    decide(backpressure, "0F0 0F1 0F2")
    backpressure.completed(task("0B0"))
    decide(backpressure, "0F3")
    assert (backpressure.in_flight, backpressure.peak) == (3, 3)
    backpressure.begin_step(4, backward=True)
    assert (backpressure.in_flight, backpressure.peak) == (0, 0)


def test_a_step_starts_over_with_microbatch_zero() -> None:
    """Neither u nor the places of the last step are left over."""
    backpressure = begun(1, 2)
    decide(backpressure, "0F0")
    backpressure.completed(task("0B0"))
    decide(backpressure, "0F1")
    backpressure.begin_step(3, backward=True)
    assert admitted(backpressure, 3) == "0F0"


def test_a_limit_above_the_microbatches_holds_nothing_back() -> None:
    """Every forward is admissible until it was decided, and none is missed after the last."""
    backpressure = begun(40, 3)
    decide(backpressure, "0F2 0F1 0F0")
    assert backpressure.admissible().any_forward
    assert backpressure.peak == 3


def test_several_chunks_keep_a_place_for_each_chunk_of_the_oldest() -> None:
    """With C chunks the bound is limit + C and the last C places are u's, in any chunk order."""
    backpressure = begun(2, 4, chunks=3)
    assert backpressure.bound == 5
    decide(backpressure, "0F1 5F2")
    assert words(filter(backpressure.admissible(), tasks("0F0 5F0 9F0 0F2 9F1"))) == "0F0 5F0 9F0"
    decide(backpressure, "9F0 0F0")
    assert words(filter(backpressure.admissible(), tasks("5F0 5F1"))) == "5F0"
    decide(backpressure, "5F0")
    assert backpressure.in_flight == backpressure.bound
    assert not backpressure.admissible()(task("5F1"))


def test_a_microbatch_stays_the_oldest_until_its_last_chunk_was_decided() -> None:
    """The place moves on only when every chunk of it ran its forward here."""
    backpressure = begun(1, 3, chunks=2)
    decide(backpressure, "0F0")
    assert backpressure.admissible() == Admissible(any_forward=False, forward_microbatch=0)
    decide(backpressure, "4F0")
    assert backpressure.admissible() == Admissible(any_forward=False, forward_microbatch=1)


def test_a_forward_only_step_counts_open_sends_instead() -> None:
    """Nothing is retained: forwards stop while `bound` sends are open, and D stays 0."""
    backpressure = begun(2, backward=False)
    decide(backpressure, "0F3 0F1 0F2")
    assert (backpressure.in_flight, backpressure.peak) == (0, 0)
    backpressure.send_opened()
    assert admitted(backpressure, 2) == "0F0 0F1"
    backpressure.send_opened()
    assert admitted(backpressure, 2) == ""
    backpressure.send_closed()
    assert admitted(backpressure, 2) == "0F0 0F1"
    assert backpressure.open_sends == 1


def test_open_sends_hold_nothing_back_in_a_training_step() -> None:
    """There D is the measure; and a new step has no open sends."""
    backpressure = begun(2, backward=False)
    backpressure.send_opened()
    backpressure.send_opened()
    backpressure.begin_step(2, backward=True)
    assert backpressure.open_sends == 0
    for _ in range(5):
        backpressure.send_opened()
    assert admitted(backpressure, 2) == "0F0 0F1"


def test_what_did_not_begin_cannot_end() -> None:
    """A backward without a forward in flight, or a send closed twice, would widen the bound."""
    backpressure = begun(2)
    with pytest.raises(ProtocolError, match="0B0"):
        backpressure.completed(task("0B0"))
    with pytest.raises(ProtocolError, match="none was open"):
        backpressure.send_closed()
    assert (backpressure.in_flight, backpressure.open_sends) == (0, 0)

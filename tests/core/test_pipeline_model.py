"""The model itself: it replays exactly, it overtakes, and it notices what it is there to notice."""

import pytest

from rrfp_async.backpressure import Backpressure
from rrfp_async.hints import Admissible, RankedHint, RoundHint
from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.topology import Topology
from tests.core.case import Case, Step
from tests.core.ledger import Ledger
from tests.core.pipeline_model import run
from tests.core.strategies import Shuffled
from tests.core.words import words

CHAIN = ((0, 1), (1, 2))


def chain_case(hint: str | RankedHint | RoundHint = "bf", seed: int = 0, limit: int = 4) -> Case:
    """Three stages, one step of six microbatches."""
    return Case(CHAIN, (limit,) * 3, hint, deterministic=True, steps=(Step(6),), seed=seed)


class NewestFirst(RankedHint):
    """Tries the youngest microbatch first: the worst there is for a tight limit."""

    def rank(self, task: TaskId) -> int:
        return -task.microbatch


class TurnsOnPeek(RoundHint):
    """A round that takes turns when it is asked, not when it is told."""

    def peek(self, admissible: Admissible) -> TaskId | None:
        best = super().peek(admissible)
        self._forward_turn = not self._forward_turn
        return best


class WaitsForOrder(NewestFirst):
    """A binding order: it waits for its first task even if others are ready."""

    def peek(self, admissible: Admissible) -> TaskId | None:
        best = super().peek(admissible)
        return best if not self.ahead_of(best, 1) else None


def test_a_case_runs_the_same_again() -> None:
    """A printed case is all that a replay needs, and another seed is another run."""
    first, again, other = (
        words(run(case)[0].started)
        for case in (chain_case(Shuffled(3), 7), chain_case(Shuffled(3), 7), chain_case(seed=8))
    )
    assert first == again != other


def test_the_repr_of_a_case_is_the_case() -> None:
    """What a failure prints can be pasted."""
    case = chain_case("fb", seed=5)
    assert eval(repr(case)) == case
    assert case.topology == Topology(3)


def test_messages_overtake_one_another() -> None:
    """Under some seed the second stage runs its forwards in another order than the first."""

    def forwards(ledger: Ledger, stage: int) -> list[int]:
        return [t.microbatch for t in ledger.started if (t.stage, t.kind) == (stage, TaskKind.F)]

    ran = [run(chain_case("f-priority", seed=seed))[0] for seed in range(20)]
    assert any(forwards(ledger, 0) != forwards(ledger, 1) for ledger in ran)


def test_forgetting_the_kept_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stage, two microbatches, limit 1, F1 taken first: the smallest deadlock of DESIGN 6."""
    case = Case((), (1,), NewestFirst(), deterministic=True, steps=(Step(2),))
    run(case)
    monkeypatch.setattr(
        Backpressure, "admissible", lambda self: Admissible(self.in_flight < self.bound)
    )
    with pytest.raises(AssertionError, match="0F1 is not among"):
        run(case)


def test_a_choice_that_changes_with_asking_is_noticed() -> None:
    """A round must not take turns on a peek."""
    with pytest.raises(AssertionError, match="choosing changed the choice"):
        run(chain_case(TurnsOnPeek(forward_first=False)))


def test_a_rank_that_waits_for_one_task_is_noticed() -> None:
    """Readiness first: nothing may idle while something may run."""
    with pytest.raises(AssertionError, match="idles though"):
        run(chain_case(WaitsForOrder()))


def test_a_step_that_stuck_is_noticed() -> None:
    """Tasks that never ran are a deadlock, and the message shows some of them."""
    case = chain_case()
    with pytest.raises(AssertionError, match=r"deadlock: 36 tasks left.*0B0"):
        Ledger(case, case.steps[0]).check_complete()

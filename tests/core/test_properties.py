"""What holds for every pipeline, hint, limit and order of events.

Each property runs two steps on the same objects and lets a `Ledger` judge every call: each task
runs once, what it depends on came before it, D stays within the limit and is counted rightly, a
rank never idles while something may run, a decision passes over only what could not run, and no
step gets stuck. A failure prints its `Case`; `run(Case(...))` replays it.
RRFP_HYPOTHESIS_PROFILE=all searches five times as far.
"""

from hypothesis import given, note
from hypothesis import strategies as st

from rrfp_async.ids import TaskKind
from tests.core.case import Case
from tests.core.ledger import Ledger
from tests.core.pipeline_model import run
from tests.core.strategies import (
    EVALUATION,
    NAMED,
    SHUFFLED,
    TRAINING,
    any_graphs,
    cases,
    chains,
    chunked_cases,
    two_encoders,
)

TIGHT = st.integers(1, 3)


def check(case: Case) -> list[Ledger]:
    """Run `case`, and print how to run it again if it fails."""
    note(f"replay: run({case!r})")
    return run(case)


@given(cases(graphs=chains(), hints=NAMED))
def test_a_chain_trains_under_every_named_hint(case: Case) -> None:
    """1 to 12 stages in a row, ordered or free accumulation."""
    check(case)


@given(cases(graphs=chains(), hints=SHUFFLED))
def test_a_chain_trains_under_any_permutation(case: Case) -> None:
    """A hint may be as bad as it likes: it ranks, and nothing waits for it."""
    check(case)


@given(cases(graphs=two_encoders(), hints=NAMED))
def test_joined_encoders_train_under_every_named_hint(case: Case) -> None:
    """Forwards that need two arrivals and backwards that need several, with skips."""
    check(case)


@given(cases(graphs=two_encoders() | any_graphs(), hints=SHUFFLED))
def test_any_graph_trains_under_any_permutation(case: Case) -> None:
    """Whatever flows upwards to the last stage."""
    check(case)


@given(cases(limits=TIGHT, hints=SHUFFLED, deterministic=st.just(True), second=TRAINING))
def test_tight_limits_never_deadlock_ordered_accumulation(case: Case) -> None:
    """Limits of 1 to 3 that differ between ranks: the places kept for u are enough."""
    check(case)


@given(cases(limits=TIGHT, deterministic=st.just(False), second=TRAINING))
def test_tight_limits_never_deadlock_free_accumulation(case: Case) -> None:
    """The same where backwards may overtake, under every kind of hint."""
    check(case)


@given(cases(limits=TIGHT, hints=NAMED | SHUFFLED, second=TRAINING, splits=st.just(1.0)))
def test_tight_limits_never_deadlock_a_split_backward(case: Case) -> None:
    """D counts until W, and W may be ranked last or first."""
    check(case)


@given(chunked_cases())
def test_several_chunks_a_rank_train_in_any_placement(case: Case) -> None:
    """1 to 4 stages a rank, in a loop, a V or anywhere, split or not, ordered or free."""
    check(case)


@given(chunked_cases(limits=TIGHT, second=TRAINING))
def test_tight_limits_never_deadlock_several_chunks(case: Case) -> None:
    """The C places kept for the oldest microbatch take it through all chunks of a rank."""
    check(case)


@given(cases(first=EVALUATION, second=EVALUATION))
def test_forward_only_steps_end_whatever_overtakes(case: Case) -> None:
    """Open sends bound the forwards, and nothing is retained."""
    for step in check(case):
        assert not any(step.peak)
        assert all(task.kind is TaskKind.F for task in step.started)


@given(cases(first=EVALUATION, second=TRAINING))
def test_a_training_step_may_follow_an_evaluation(case: Case) -> None:
    """No count of the one is left over for the other."""
    check(case)

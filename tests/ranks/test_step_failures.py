"""HAZARDS 18 on real ranks: an exception anywhere ends the step everywhere, with its cause."""

from collections.abc import Iterator

import pytest

from tests.ranks.launching import WORKER, Job, start_torchrun
from tests.ranks.plan import Fault, Plan

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(90)]

RANKS = 3
WITHIN_S = 5.0
WHERE = {"forward": 1, "backward": 1, "loss": 2, "data": 0}
TASKS = {"forward": "1F2", "backward": "1I2", "loss": "2F2"}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One job whose Runtimes fail one after another, each in its own way, then one that works."""
    plans = [
        Plan(fault=Fault(rank=rank, where=where), then="again") for where, rank in WHERE.items()
    ]
    words = [word for plan in [*plans, Plan()] for word in plan.words()]
    job = start_torchrun(tmp_path_factory.mktemp("failures"), RANKS, WORKER, words)
    try:
        job.wait(within_s=60)
        yield job
    finally:
        job.end()


@pytest.mark.parametrize("where", list(WHERE))
def test_an_exception_fails_the_step_on_every_rank_within_five_seconds(
    job: Job, where: str
) -> None:
    """From the raise on one rank to `StepFailed` on all; the step before it ended well."""
    number = list(WHERE).index(where)
    raised = job.event(WHERE[where], "boom", where=where)
    for rank, failure in job.failures(number=number).items():
        assert failure["type"] == "StepFailed"
        assert 0 <= failure["time"] - raised["time"] < WITHIN_S
        assert [e["step"] for e in job.events(rank, "step") if e["number"] == number] == [0]


@pytest.mark.parametrize("where", list(WHERE))
def test_every_rank_is_told_who_failed_and_why(job: Job, where: str) -> None:
    """Rank, step and cause; outside a task there is no stage, task or microbatch to name."""
    for rank, failure in job.failures(number=list(WHERE).index(where)).items():
        failed = failure["failed"]
        assert (failed["rank"], failed["step"]) == (WHERE[where], 1)
        assert failed["cause"] == f"Boom: told {where}"
        assert f"rank {WHERE[where]}" in failure["message"]
        assert failure["cause"] == ("Boom" if rank == WHERE[where] else None)


@pytest.mark.parametrize("where", list(TASKS))
def test_every_rank_is_told_the_task_and_what_happened_to_it(job: Job, where: str) -> None:
    """Stage, task, microbatch and the task's last records, the same on all ranks."""
    failures = job.failures(number=list(WHERE).index(where))
    told = [failure["failed"] for failure in failures.values()]
    assert told == [told[0]] * RANKS
    assert (told[0]["stage"], told[0]["task"], told[0]["microbatch"]) == (
        WHERE[where],
        TASKS[where],
        2,
    )
    assert told[0]["records"][-1].endswith(f"dispatched {TASKS[where]}")


@pytest.mark.parametrize("where", list(WHERE))
def test_the_next_step_is_refused_on_every_rank(job: Job, where: str) -> None:
    """With a StateError that repeats the cause."""
    for rank in range(RANKS):
        refused = job.event(rank, "refused", number=list(WHERE).index(where))
        assert f"Boom: told {where}" in refused["message"]


def test_a_new_runtime_works_after_four_that_failed(job: Job) -> None:
    """The same processes build it; all its steps end with one loss on all ranks."""
    losses = [
        [e["loss"] for e in job.events(rank, "step") if e["number"] == len(WHERE)]
        for rank in range(RANKS)
    ]
    assert losses == [losses[0]] * RANKS
    assert len(losses[0]) == Plan().steps


def test_processes_whose_runtimes_failed_end_in_order(job: Job) -> None:
    """Each exits with the status its program gave; no abort by a thread that was left waiting."""
    job.assert_orderly()
    assert "exitcode  : 1 " in job.text_of_torchrun()
    assert "exitcode  : -6" not in job.text_of_torchrun()

"""HAZARDS 24 and 25, restarts, and several Runtimes in one job: how lives begin and end."""

import pytest

from tests.ranks.conftest import Launch
from tests.ranks.launching import Job
from tests.ranks.plan import Fault, Plan

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(90)]

LATE_S = 3.0
ENDS_WITHIN_S = 5.0
STEPS = Plan().steps


def losses(job: Job, rank: int, number: int = 0, *, attempt: int = 0) -> list[float]:
    """The losses that a rank has told of its Runtime `number`."""
    steps = [e for e in job.events(rank, "step", attempt=attempt) if e["number"] == number]
    assert [e["step"] for e in steps] == list(range(len(steps)))
    return [e["loss"] for e in steps]


def assert_all_finished(job: Job, runtimes: int = 1, *, attempt: int = 0) -> None:
    """Every rank has taken every step of every Runtime, with equal losses."""
    for number in range(runtimes):
        told = [losses(job, rank, number, attempt=attempt) for rank in range(job.ranks)]
        assert told == [told[0]] * job.ranks, job.story()
        assert len(told[0]) == STEPS, job.story()


@pytest.mark.parametrize(
    ("where", "step"),
    [
        pytest.param("late_start", 0, marks=pytest.mark.slow),
        pytest.param("late_step", 0, marks=pytest.mark.slow),
        pytest.param("late_step", 1, marks=pytest.mark.slow),
    ],
)
def test_no_message_is_lost_when_a_rank_comes_three_seconds_late(
    launch: Launch, where: str, step: int
) -> None:
    """Late in opening, late to the first step, late to a later one: the steps still come right."""
    fault = Fault(rank=1, where=where, step=step, after_s=LATE_S)
    job = launch(2, Plan(fault=fault), Plan())
    assert job.wait() == [0], job.story()
    assert_all_finished(job, 2)
    assert losses(job, 0, 0) == losses(job, 0, 1), "late or not, the same losses"
    if where == "late_step":
        begun = job.event(0, "step", number=0, step=step)["time"]
        opened = job.event(0, "open", number=0)["time"]
        assert begun - opened > LATE_S - 0.5, "it was late indeed"


@pytest.mark.slow
def test_rank_zero_may_be_the_late_one(launch: Launch) -> None:
    """The first rank, which announces the steps, comes three seconds late to each phase."""
    plans = [Plan(fault=Fault(rank=0, where=w, step=0)) for w in ("late_start", "late_step")]
    job = launch(3, *plans)
    assert job.wait() == [0], job.story()
    assert_all_finished(job, 2)


@pytest.mark.slow
def test_processes_that_return_without_closing_or_close_twice_end_soon(launch: Launch) -> None:
    """All ranks close the first Runtime twice and leave the second as it is; status 0."""
    job = launch(2, Plan(then="twice"), Plan(then="leave"))
    for rank in range(2):
        job.wait_for(rank, "open")
    job.pids()
    last = {rank: job.wait_for(rank, "ending")["time"] for rank in range(2)}
    ended = job.wait_ended(range(2), within_s=30)
    assert [rank for rank in ended if ended[rank] - last[rank] > ENDS_WITHIN_S] == [], job.story()
    assert job.wait() == [0], job.story()
    assert_all_finished(job, 2)
    job.assert_orderly()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["raise", "return"])
def test_a_rank_that_leaves_without_closing_ends_soon_and_is_named_by_the_others(
    launch: Launch, where: str
) -> None:
    """After an exception or a return between steps; the others are in the next step."""
    job = launch(3, Plan(then="leave", fault=Fault(rank=1, where=where)))
    for rank in range(3):
        job.wait_for(rank, "open")
    job.pids()
    left = job.wait_for(1, "leaving")["time"]
    ended = job.wait_ended(range(3), within_s=30)
    assert {rank: at for rank, at in ended.items() if at - left > ENDS_WITHIN_S} == {}, job.story()
    for rank in (0, 2):
        assert job.event(rank, "failed")["failed"]["rank"] == 1, job.story()
    job.assert_orderly()
    job.assert_nothing_left(within_s=ENDS_WITHIN_S)


@pytest.mark.slow
def test_processes_end_soon_after_an_exception_in_the_middle_of_a_step(launch: Launch) -> None:
    """4 MB tensors are on their way and nobody closes anything."""
    fault = Fault(rank=1, where="forward", step=1)
    job = launch(3, Plan(then="leave", fault=fault, width=1024, rows=1024))
    for rank in range(3):
        job.wait_for(rank, "open")
    job.pids()
    raised = job.wait_for(1, "boom")["time"]
    ended = job.wait_ended(range(3), within_s=30)
    late = {rank: at for rank, at in ended.items() if at - raised > ENDS_WITHIN_S}
    assert late == {}, job.story()
    job.assert_orderly()


@pytest.mark.slow
def test_a_restarted_attempt_starts_clean_and_finishes(launch: Launch) -> None:
    """Rank 1 crashes in attempt 0; attempt 1 meets nothing of it in the same store."""
    job = launch(3, Plan(fault=Fault(rank=1, where="crash")), max_restarts=1)
    assert job.wait(within_s=60) == [0], job.story()
    assert_all_finished(job, attempt=1)
    assert all(losses(job, rank) == losses(job, rank, attempt=1)[:1] for rank in range(3))
    job.assert_nothing_left()


def test_two_runtimes_work_one_after_another_and_at_once(launch: Launch) -> None:
    """Three Runtimes per rank train at the same time; each comes to the losses of one alone."""
    plan = Plan(forward_s=0.002, config={"peer_timeout_s": 5.0})
    job = launch(2, plan, plan, plan, words=("at-once",))
    assert job.wait() == [0], job.story()
    assert_all_finished(job, 3)
    assert losses(job, 0, 0) == losses(job, 0, 1) == losses(job, 0, 2)
    first_end = min(job.event(0, "done", number=number)["time"] for number in range(3))
    last_open = max(job.event(0, "open", number=number)["time"] for number in range(3))
    assert last_open < first_end, "they were open at the same time"


@pytest.mark.slow
def test_a_runtime_that_fails_leaves_another_one_of_the_same_ranks_alone(launch: Launch) -> None:
    """Two at once: the second fails in its second step, the first takes all of its steps."""
    job = launch(
        2,
        Plan(forward_s=0.02, config={"peer_timeout_s": 5.0}),
        Plan(config={"peer_timeout_s": 5.0}, fault=Fault(rank=1, where="forward"), then="again"),
        words=("at-once",),
    )
    job.wait()
    assert_all_finished(job, 1)
    assert set(job.failures(number=1)) == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_cancelling_the_step_of_one_rank_ends_it_on_all_within_two_seconds(
    launch: Launch, rank: int
) -> None:
    """The others get a StepFailed that names the rank."""
    fault = Fault(rank=rank, where="cancel", after_s=0.5)
    job = launch(3, Plan(fault=fault, forward_s=0.2, steps=4))
    cancelled = job.wait_for(rank, "cancel")["time"]
    for other in range(3):
        failure = job.wait_for(other, "failed")
        assert failure["time"] - cancelled < 2.0, job.story()
        if other != rank:
            assert failure["type"] == "StepFailed"
            assert failure["failed"]["rank"] == rank
            assert "the step was cancelled there" in failure["message"]
    job.wait()

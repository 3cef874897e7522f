"""A step in which nothing progresses fails everywhere, and every rank says what it waits for."""

import re

import pytest

from tests.ranks.conftest import Launch
from tests.ranks.plan import Fault, Plan

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(90)]

STALL_TIMEOUT_S = 4.0
ABSENT_S = 15.0
RANKS = 3


def plan(where: str, step: int, rank: int = 1) -> Plan:
    """Rank `rank` is the culprit."""
    return Plan(
        config={"stall_timeout_s": STALL_TIMEOUT_S, "peer_timeout_s": 5.0},
        fault=Fault(rank=rank, where=where, step=step, after_s=ABSENT_S),
    )


def report_of(rank: int, cause: str) -> str:
    """The part of a stall's cause that is about `rank`."""
    found = re.search(rf"\brank {rank}: (.*?)(?=; rank \d+: |$)", cause, re.DOTALL)
    assert found, f"nothing about rank {rank} in: {cause}"
    return found[1]


def assert_report(told: str) -> None:
    """What is ready, what is waited for, and which transfers are open."""
    assert re.search(r"\bready\b", told), told
    assert "waits for" in told, told
    assert re.search(r"\d+ sends and \d+ receives open", told), told


@pytest.mark.parametrize("step", [0, 1])
def test_a_rank_that_never_calls_train_step_fails_the_others_with_every_report(
    launch: Launch, step: int
) -> None:
    """Within twice the stall timeout; all name the absent rank; its own late call fails too."""
    job = launch(RANKS, plan("absent", step))
    begun = job.wait_for(1, "step" if step else "open")["time"]
    for rank in (0, 2):
        failure = job.wait_for(rank, "failed", within_s=30)
        assert failure["time"] - begun < 2 * STALL_TIMEOUT_S + 1, job.story()
        assert report_of(1, failure["message"]).startswith("is not in this step"), job.story()
        if step:
            assert_report(report_of(0, failure["message"]))
            assert_report(report_of(2, failure["message"]))
    job.wait()


@pytest.mark.parametrize("step", [0, 1])
def test_a_first_rank_that_never_calls_train_step_is_named_by_the_others(
    launch: Launch, step: int
) -> None:
    """Rank 0, which would have announced the step; within twice the stall timeout."""
    job = launch(RANKS, plan("absent", step, rank=0))
    begun = job.wait_for(0, "step" if step else "open")["time"]
    for rank in (1, 2):
        failure = job.wait_for(rank, "failed", within_s=30)
        assert failure["type"] == "StepFailed"
        assert failure["time"] - begun < 2 * STALL_TIMEOUT_S + 1, job.story()
        assert failure["failed"]["rank"] == 0
    job.wait()


def test_a_forward_that_never_ends_fails_the_step_everywhere_with_every_report(
    launch: Launch,
) -> None:
    """Its own rank too, and that process ends although its compute thread does not."""
    job = launch(RANKS, plan("hang", 1))
    hung = job.wait_for(1, "hang")["time"]
    job.pids()
    for rank in range(RANKS):
        failure = job.wait_for(rank, "failed", within_s=30)
        assert failure["type"] == "StepFailed"
        assert failure["time"] - hung < 2 * STALL_TIMEOUT_S + 1, job.story()
        for other in range(RANKS):
            assert_report(report_of(other, failure["message"]))
    job.wait_ended(range(RANKS), within_s=10)
    job.assert_nothing_left(within_s=10)

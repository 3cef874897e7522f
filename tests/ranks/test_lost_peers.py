"""HAZARDS 19 and more: a rank that dies or falls silent is named by the others, in time."""

import random
import signal
import time

import pytest

from tests.ranks.conftest import Launch
from tests.ranks.launching import Job
from tests.ranks.plan import Plan

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]

PEER_TIMEOUT_S = 3.0
GRACE_S = 5.0
MOMENTS = 10
STEPS_FOR_EVER = 100_000


def plan() -> Plan:
    """Steps of about a second on three or four ranks: wherever it strikes, a step is running."""
    return Plan(steps=STEPS_FOR_EVER, forward_s=0.1, config={"peer_timeout_s": PEER_TIMEOUT_S})


def survivors_end(job: Job, victim: int, struck: float) -> None:
    """All others end in time, each naming the victim in a `StepFailed`; torchrun fails too."""
    others = [rank for rank in range(job.ranks) if rank != victim]
    ended = job.wait_ended(others, within_s=PEER_TIMEOUT_S + GRACE_S + 20)
    late = {
        rank: at - struck for rank, at in ended.items() if at - struck > PEER_TIMEOUT_S + GRACE_S
    }
    assert not late, f"ended late: {late}\n{job.story()}"
    for rank in others:
        failure = job.event(rank, "failed")
        assert failure["type"] == "StepFailed", job.story()
        assert failure["failed"]["rank"] == victim, job.story()
        assert f"rank {victim}" in failure["message"]
    job.let_go(victim)
    job.assert_nothing_left()
    assert job.wait() == [1], job.story()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_survivors_name_a_rank_that_died_or_stopped_within_the_peer_timeout(
    launch: Launch, number: signal.Signals
) -> None:
    """Rank 1 of 3 is struck mid-step."""
    job = launch(3, plan())
    job.wait_for(0, "step")
    job.pids()
    struck = job.signal(1, number)
    survivors_end(job, 1, struck)
    job.assert_orderly()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, MOMENTS))]
)
def test_a_random_rank_killed_at_a_random_moment_is_named_by_the_others(
    launch: Launch, seed: int
) -> None:
    """Four ranks, kill -9 within three seconds after the first step; 10 of 10."""
    draw = random.Random(seed)
    victim, moment_s = draw.randrange(4), draw.uniform(0.0, 3.0)
    print(f"seed {seed}: rank {victim} after {moment_s:.3f} s")
    job = launch(4, plan())
    job.wait_for(0, "step")
    job.pids()
    time.sleep(moment_s)  # the moment is what is drawn
    survivors_end(job, victim, job.signal(victim, signal.SIGKILL))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_before_it_came_up_does_not_hold_the_others(
    launch: Launch, victim: int
) -> None:
    """Killed when it began to open its Runtime; the others end within the peer timeout."""
    job = launch(3, plan())
    job.wait_for(victim, "started")
    struck = job.signal(victim, signal.SIGKILL)
    job.assert_nothing_left(within_s=PEER_TIMEOUT_S + GRACE_S)
    assert time.monotonic() - struck < PEER_TIMEOUT_S + GRACE_S
    assert job.wait() == [1]
    assert not [rank for rank in range(3) if job.events(rank, "step")]


@pytest.mark.slow
def test_a_rank_that_stops_while_the_others_wait_for_the_next_step_is_named(
    launch: Launch,
) -> None:
    """Rank 1 stops between steps, at once after its first: the next one fails in time."""
    job = launch(2, plan())
    job.wait_for(1, "step")
    job.pids()
    struck = job.signal(1, signal.SIGSTOP)
    survivors_end(job, 1, struck)

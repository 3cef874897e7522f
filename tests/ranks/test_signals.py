"""HAZARDS 27: Ctrl-C ends everything soon, with one short message per rank from us."""

import os
import signal
import time

import pytest

from tests.ranks.conftest import Launch
from tests.ranks.launching import EXAMPLE, Job
from tests.ranks.plan import Fault, Plan

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(90)]

RANKS = 3
GONE_WITHIN_S = 10.0
EXAMPLE_WORDS = ("--steps", "400")


def interrupt(job: Job, *, terminal: bool) -> None:
    """SIGINT to torchrun or, as a terminal does, to all its processes; all are gone in time."""
    job.pids()
    begun = time.monotonic()
    if terminal:
        os.killpg(job.roots[0].pid, signal.SIGINT)
    else:
        os.kill(job.roots[0].pid, signal.SIGINT)
    job.assert_nothing_left(within_s=GONE_WITHIN_S)
    assert time.monotonic() - begun < GONE_WITHIN_S
    assert job.wait() != [0]


@pytest.mark.parametrize(
    "terminal", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["torchrun", "terminal"]
)
def test_an_interrupt_in_the_middle_of_a_step_ends_the_example_with_one_line_a_rank(
    launch: Launch, terminal: bool
) -> None:
    """No traceback of ours; torchrun's own is its own."""
    job = launch(RANKS, script=EXAMPLE, words=EXAMPLE_WORDS)
    job.wait_for_text(0, "step 5/400")
    interrupt(job, terminal=terminal)
    for rank in range(RANKS):
        told = job.text(rank, "stderr").splitlines()
        ours = [line for line in told if not line.startswith("step ")]
        assert len(ours) == 1, job.story()
        assert len(ours[0]) < 200
        assert ours[0].startswith((f"rank {rank} interrupted", f"error on rank {rank}:"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_to_torchrun_while_all_ranks_are_idle_ends_them(
    launch: Launch, number: signal.Signals
) -> None:
    """They wait between two steps, in their own program; no process is left after ten seconds."""
    job = launch(RANKS, Plan(then="idle"))
    for rank in range(RANKS):
        job.wait_for(rank, "idle")
    begun = time.monotonic()
    os.kill(job.roots[0].pid, number)
    job.assert_nothing_left(within_s=GONE_WITHIN_S)
    assert time.monotonic() - begun < GONE_WITHIN_S
    assert "terminate called" not in job.story()


@pytest.mark.slow
def test_an_interrupt_while_the_others_have_not_come_up_ends_the_rest(launch: Launch) -> None:
    """Two ranks wait in opening for the third, which is still asleep."""
    job = launch(RANKS, Plan(fault=Fault(rank=1, where="late_start", after_s=60)))
    for rank in (0, 2):
        job.wait_for(rank, "opening")
    os.kill(job.roots[0].pid, signal.SIGINT)
    job.assert_nothing_left(within_s=GONE_WITHIN_S)

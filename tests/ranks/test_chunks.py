"""Two stages a rank on real ranks: HAZARDS 10, and budgets in bytes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import logs
from tests.ranks.conftest import Launch
from tests.ranks.launching import Job, start_torchrun
from tests.ranks.worker_chunks import FEATURES, MICROBATCHES, SIZES

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(90)]

WORKER = Path(__file__).with_name("worker_chunks.py")
RANKS = 2
LATE_S = 1.0
TIMER_S = 0.01  # how early a timer may be
TENSOR_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Late:
    """A job in which the first tensor of rank `source` is late.

    Attributes:
        before: The stages of each rank that need no tensor of that link to run their forwards.
    """

    placement: str
    source: int
    before: tuple[tuple[int, ...], tuple[int, ...]]


LATE = {
    "loop": Late("loop", 1, ((0,), (1,))),
    "v": Late("v", 1, ((0,), (1, 2))),
    "halves": Late("0,0,1,1", 0, ((0, 1), ())),
}
"""A link is FIFO, so all that a rank sends to the other waits in line behind the late one."""


@pytest.fixture(scope="module", params=list(LATE))
def late(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Late, Job]]:
    """One step of five microbatches of 4 MiB."""
    what = LATE[request.param]
    folder = tmp_path_factory.mktemp("late")
    words = ["late", what.placement, f"{what.source}:{LATE_S}", str(folder / "trace")]
    job = start_torchrun(folder, RANKS, WORKER, words)
    try:
        assert job.wait() == [0], job.story()
        yield what, job
    finally:
        job.end()


def order(job: Job, rank: int) -> list[str]:
    """The rank's tasks in the order of its log."""
    return logs.dispatched(job.folder / "trace", rank)


def test_other_ready_tasks_run_while_the_first_activation_is_late(late: tuple[Late, Job]) -> None:
    """Within that second, on both stages of a rank where an edge between them is local."""
    what, job = late
    link = f"{what.source}=>{1 - what.source}"
    held = job.event(what.source, "held", link=link, sequence=0)["time"]
    sent = job.event(what.source, "sent", link=link, sequence=0)["time"]
    assert sent - held >= LATE_S - TIMER_S
    for rank, stages in enumerate(what.before):
        count = len(stages) * MICROBATCHES
        early = [e["stage"] for e in job.events(rank, "forward") if e["time"] < sent]
        assert sorted(early) == sorted(stages * MICROBATCHES), job.story()
        expected = [f"{stage}F{j}" for stage in stages for j in range(MICROBATCHES)]
        assert sorted(order(job, rank)[:count]) == sorted(expected)


def test_the_late_tensor_was_as_large_as_the_hazard_says(late: tuple[Late, Job]) -> None:
    """4 MB, and it came."""
    what, job = late
    link = f"{what.source}=>{1 - what.source}"
    received = job.event(1 - what.source, "received", link=link, sequence=0)
    assert received["bytes"] == TENSOR_BYTES


def test_a_late_activation_changes_no_bit(late: tuple[Late, Job]) -> None:
    """Loss and every gradient are the unpartitioned model's, on every rank."""
    _, job = late
    assert [job.event(rank, "step")["wrong"] for rank in range(RANKS)] == [[]] * RANKS
    job.assert_orderly()


# -- budgets ---------------------------------------------------------------------------------------

ROW = FEATURES * 4
LARGE = 2 * 64 * max(SIZES) * ROW
"""What a stage keeps of the largest microbatch: its input and its output."""
FORWARDS = 4
SCALARS = 16
LEAST = 2


@pytest.mark.parametrize("placement", ["loop", "v"])
def test_a_budget_holds_on_real_ranks(launch: Launch, placement: str) -> None:
    """A larger microbatch comes seventh: no deadlock, the bits, and the peak once it is known.

    Then a budget that is too small fails on every rank, with the bytes named, at once.
    """
    enough, short = FORWARDS * (LARGE + SCALARS), LEAST * LARGE - 1
    words = ("budget", placement, str(enough), str(short))
    job = launch(RANKS, script=WORKER, words=words)
    assert job.wait() == [0], job.story()
    for rank in range(RANKS):
        failed = job.events(rank, "failed")
        assert [event["budget"] for event in failed] == [short], job.story()
        assert f"activation_budget_bytes={short} is below " in failed[0]["message"]
        assert job.event(rank, "done", budget=short)["took_s"] < 5.0
        first, second = job.events(rank, "step")[:2]
        assert first["wrong"] == second["wrong"] == []
        assert second["peak"] <= FORWARDS
    job.assert_orderly()

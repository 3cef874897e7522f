"""Checkpoints between processes: resumed on more and on fewer of them, and when one is gone."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.conftest import Launch
from tests.ranks.launching import Job
from tests.runtime.checkpoints import Grid, differing, live, momentum

WORKER = Path(__file__).with_name("worker_checkpoint.py")
SILENT_S = 2.0

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]


def plan(save: Path, **more: Any) -> str:
    """The worker's command line."""
    told = {"load": None, "steps": 3, "peer_timeout_s": 30.0, "default_group": False, "hang": False}
    return json.dumps({**told, "save": str(save), **more})


def losses(job: Job) -> list[float]:
    """The losses of a job that went well, equal on every rank."""
    assert job.wait() == [0], job.story()
    job.assert_orderly()
    told = [job.event(rank, "trained")["losses"] for rank in range(job.ranks)]
    assert told == [told[0]] * job.ranks
    return told[0]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
async def test_processes_resume_what_another_number_of_them_saved_bit_for_bit(
    launch: Launch, tmp_path: Path, before: int, after: int
) -> None:
    """Six steps in all, losses and values as of one process; also beside a group of torch's own."""
    first, second = tmp_path / "first", tmp_path / "second"
    unbroken = await live(Grid(2), momentum, 6)
    job = launch(before, words=(plan(first),), script=WORKER)
    assert losses(job) == unbroken.losses[:3]
    assert not job.event(0, "saved")["default_group"]
    (tmp_path / "logs").rename(tmp_path / "logs of the first")
    words = plan(second, load=str(first), default_group=True)
    job = launch(after, words=(words,), script=WORKER)
    assert losses(job) == unbroken.losses[3:]
    assert [job.event(rank, "loaded")["extra"] for rank in range(after)] == [{"by": 0}] * after
    assert {job.event(rank, "trained")["steps"] for rank in range(after)} == {6}
    final = await live(Grid(1), momentum, 0, load=second, seed=9)
    assert differing(final.values, unbroken.values) == []


@pytest.mark.slow
def test_a_process_that_stops_as_it_writes_is_named(launch: Launch, tmp_path: Path) -> None:
    """Survivors fail in `peer_timeout_s` and little more; the checkpoint before is untouched."""
    words = plan(tmp_path / "saved", hang=True, peer_timeout_s=SILENT_S)
    job = launch(3, words=(words,), script=WORKER)
    job.wait_for(1, "hanging")
    stopped = job.signal(1, signal.SIGSTOP)
    for rank in (0, 2):
        failed = job.wait_for(rank, "failed")
        assert failed["type"] == "CheckpointError"
        assert f"rank 1 was silent for {SILENT_S} s" in failed["message"]
        assert failed["time"] - stopped < SILENT_S + 5.0
    assert not (tmp_path / "saved").exists()

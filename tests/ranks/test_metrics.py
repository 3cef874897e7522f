"""`Runtime.metrics()` counts in processes what it counts in one."""

from pathlib import Path

import pytest

import rrfp_async as r
from tests.ranks.conftest import Launch
from tests.ranks.worker_metrics import RANKS, WIDTHS, counters_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(150)]

WORKER = Path(__file__).with_name("worker_metrics.py")
DIFFER = {"rrfp_messages_sent_total", "rrfp_messages_received_total"}
"""Ranks of one process greet each other before every step."""


async def test_torchrun_and_one_process_count_alike(launch: Launch) -> None:
    """Steps, tasks, transfers, bytes: also of tensors so small that they travel in their header."""
    job = launch(RANKS, script=WORKER)
    assert job.wait() == [0], job.story()
    for width in WIDTHS:
        here = await r.run_local(RANKS, lambda world, width=width: counters_of(world, width))
        for rank in range(RANKS):
            there = job.event(rank, "counted", width=width)["counters"]
            names = here[rank].keys() - DIFFER
            assert there.keys() == here[rank].keys()
            assert {name: there[name] for name in names} == {
                name: here[rank][name] for name in names
            }
            assert there["rrfp_transfer_sent_bytes_total"] > 0
            assert all(there[name] > 0 for name in DIFFER)

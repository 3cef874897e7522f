"""The logs of ranks in processes of their own: clocks are related, times add up, ends agree."""

from itertools import product
from pathlib import Path

import pytest

from tests.logs import records
from tests.ranks.hosts import run_here
from tests.trace.sums import check_sums

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(150)]

RANKS, STEPS = 4, 3
ENDS_WITHIN_S = 120.0
SAME_MACHINE_S = 1e-6
"""Processes of one machine read one clock; this much is rounding."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logs of three steps of the example on four ranks, arrivals shaken up."""
    folder = tmp_path_factory.mktemp("trace")
    words = ("--steps", str(STEPS), "--microbatches", "8", "--json", "--delay-seed", "1")
    run_here(RANKS, *words, "--trace-dir", str(folder), timeout_s=ENDS_WITHIN_S)
    return folder


def test_every_rank_s_clock_is_related_to_the_first_one_s(folder: Path) -> None:
    """The true offset is 0 here: what is found is no further off than it says."""
    for rank in range(RANKS):
        run = records(folder, rank)[0]
        assert abs(run["clock_offset_s"]) <= run["clock_error_s"] + SAME_MACHINE_S
        assert run["clock_error_s"] < 0.5
    assert records(folder, 0)[0]["clock_error_s"] == 0.0
    assert records(folder, 1)[0]["clock_error_s"] > 0.0, "nobody was asked"


def test_on_every_rank_the_parts_sum_to_the_step_and_the_spans_to_the_parts(folder: Path) -> None:
    """Within 0.1 %."""
    check_sums(folder, RANKS, STEPS, wakes_s=0.0005)


def test_what_one_rank_sends_another_receives_not_before(folder: Path) -> None:
    """Both ends tell the same task, edge and bytes; in rank 0's time the order is right."""
    sent, received = {}, {}
    for rank, line in product(range(RANKS), ("send", "receive")):
        offset_s = records(folder, rank)[0]["clock_offset_s"]
        error_s = records(folder, rank)[0]["clock_error_s"]
        for record in records(folder, rank, "transfer"):
            if record["direction"] == line:
                source = rank if line == "send" else record["peer"]
                target = record["peer"] if line == "send" else rank
                key = (record["step"], record["task"], source, target, record["bytes"])
                ends = sent if line == "send" else received
                ends[key] = (record["start_s"] + offset_s, error_s)
    assert sent.keys() == received.keys()
    assert len(sent) == STEPS * 2 * (RANKS - 1) * 8
    for key, (start_s, error_s) in sent.items():
        there_s, other_error_s = received[key]
        assert there_s >= start_s - error_s - other_error_s

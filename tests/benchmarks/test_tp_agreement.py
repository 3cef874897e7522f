"""The agreement benchmark measures what it says; how much that is, no test decides."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tp_agreement
from benchmarks.tp_agreement import Samples
from rrfp_async.topology import Topology

ROOT = Path(__file__).parents[2]


def test_a_row_is_of_all_ranks_and_steps() -> None:
    """The step is the slowest rank's, the share of all ranks' time, retries per rank and step."""
    ranks = [Samples([1.0, 3.0], [0.1, 0.1], [1, 0]), Samples([2.0, 2.0], [0.2, 0.1], [0, 0])]
    row = tp_agreement.row_of("leader", Topology(1, tp=2), ranks)
    assert row["step_ms"] == pytest.approx(2500.0)
    assert row["wait_share"] == pytest.approx(0.5 / (2 * 5.0))
    assert row["retries"] == pytest.approx(0.25)
    assert (row["protocol"], row["pp"], row["tp"]) == ("leader", 1, 2)


@pytest.mark.parametrize("words", ["4", "4x1", "0x2", "4x2,", "axb"])
def test_grids_that_are_none_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the rule and an example."""
    with pytest.raises(SystemExit):
        tp_agreement.parse(["--grids", words])
    assert "at least 2 ranks a stage, as in 4x2,2x4" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_a_launch_ends_in_a_row_for_each_protocol() -> None:
    """Under torchrun, two ranks that share a stage."""
    size = ["--grids", "1x2", "--steps", "1", "--microbatches", "2", "--jitter", "J0", "--json"]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.tp_agreement", *size],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)["rows"]
    assert [row["protocol"] for row in rows] == ["leader", "allgather"]
    for row in rows:
        assert row["step_ms"] > 60.0  # two microbatches of 10 and 20 ms
        assert 0.0 <= row["wait_share"] < 1.0
    assert rows[0]["retries"] == 0.0

"""The scaling benchmark divides by what it says; how much that is, no test decides."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import scaling

ROOT = Path(__file__).parents[2]
NUMBERS = ("cpu_us_per_task", "cpu_us_per_message", "memory_mib_per_rank")


def test_a_row_divides_by_all_ranks_tasks_and_messages() -> None:
    """Two ranks, four microbatches: 24 tasks of F, I and W, 8 headers there and back."""
    row = scaling.row_of("real", 2, 4, cpu_s=0.0048, memory_bytes=6 * 2**20)
    assert (row["world"], row["ranks"], row["microbatches"]) == ("real", 2, 4)
    assert [row[name] for name in NUMBERS] == pytest.approx([200.0, 600.0, 3.0])
    assert list(row)[-3:] == list(NUMBERS), "the table shows the last three as numbers"


def test_the_last_rank_sends_no_activation_and_the_first_no_gradient() -> None:
    """Of sixteen ranks thirty edges carry each microbatch once."""
    row = scaling.row_of("virtual", 16, 10, cpu_s=1.0, memory_bytes=0.0)
    assert row["cpu_us_per_message"] == pytest.approx(1e6 / 300)
    assert row["cpu_us_per_task"] == pytest.approx(1e6 / 480)


@pytest.mark.parametrize("option", ["--real", "--microbatches", "--virtual"])
@pytest.mark.parametrize("value", ["1", "2,x", "-4", ""])
def test_counts_below_two_are_refused_by_name(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, with the value: one rank sends no messages to divide by."""
    with pytest.raises(SystemExit) as ended:
        scaling.main([f"{option}={value}"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert option in told
    assert repr(value) in told


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_real_and_virtual_ranks_have_their_rows() -> None:
    """Two processes, then eight ranks in one; both took time."""
    sizes = ["--real", "2", "--microbatches", "16", "--virtual", "8"]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.scaling", *sizes, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)["rows"]
    found = [(row["world"], row["ranks"], row["microbatches"]) for row in rows]
    assert found == [("real", 2, 16), ("virtual", 8, 16)]
    assert all(row["cpu_us_per_task"] > 0.0 for row in rows)
    assert all(row["memory_mib_per_rank"] >= 0.0 for row in rows)

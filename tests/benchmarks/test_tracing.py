"""The tracing benchmark measures what it says; how little that is, no test decides."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tracing

ROOT = Path(__file__).parents[2]


def test_the_summary_is_of_pairs() -> None:
    """A step beside the other one counts, not medians of all: here every pair says 10 %."""
    found = tracing.summary([(11.0, 10.0), (110.0, 100.0), (2.2, 2.0)])
    assert found["on_over_off"] == pytest.approx(1.1)
    assert (found["on_ms"], found["off_ms"], found["pairs"]) == (11.0, 10.0, 3)


def test_the_calls_of_a_recorder_that_keeps_nothing_are_clocked() -> None:
    """They take some time."""
    assert tracing.disabled_us() > 0.0


def test_what_a_task_counts_is_clocked() -> None:
    """It takes some time."""
    assert tracing.metrics_us() > 0.0


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_two_ranks_take_steps_of_both_kinds() -> None:
    """Under torchrun: as many pairs of blocks as hold the steps, and one of each has a log."""
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.tracing", "--ranks", "2", "--json"),
            *("--steps", "5", "--block", "2"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert (result["ranks"], result["pairs"]) == (2, 3)
    assert result["lines_per_task"] > 1.0
    assert result["on_ms"] > 32.0 < result["off_ms"]  # 32 tasks of 1 ms

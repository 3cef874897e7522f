"""Every command on 64 ranks, 64 microbatches and three steps, and how soon one begins."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.inspection.planted import Planted, tables

MOST_S = 10.0
COMMANDS = [
    ["report"],
    ["report", "--json"],
    ["report", "--html", "report.html"],
    ["timeline", "--out", "timeline.png"],
    ["timeline", "--out", "timeline.svg"],
    ["timeline", "--out", "timeline.html"],
    ["explain"],
    ["explain", "--task", "20B60"],
    ["compare", "trace"],
    ["export", "--perfetto", "trace.json"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the trace is."""
    folder = tmp_path_factory.mktemp("large")
    Planted(tables(64, 64)).write(folder / "trace", steps=3)
    return folder


def ran_s(folder: Path, *arguments: str) -> float:
    """Processor seconds of the command in a process of its own: what else runs does not count."""
    code = (
        "import sys, time; from rrfp_async.cli import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; "
        "print(f'\\nran {time.process_time()}'); sys.exit(status)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"},
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return float(ended.stdout.rsplit("ran ", 1)[1])


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join(given) for given in COMMANDS])
def test_a_large_trace_takes_no_command_ten_seconds(command: list[str], folder: Path) -> None:
    """Nor does it load torch."""
    if command[0] == "timeline":
        pytest.importorskip("bokeh", reason="the extra `pictures` is not installed")
        pytest.importorskip("matplotlib", reason="the extra `pictures` is not installed")
    took_s = ran_s(folder, command[0], "trace", *command[1:])
    assert took_s < MOST_S

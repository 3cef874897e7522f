"""docs/debugging.md shows what its commands really print."""

import re
import shlex
from pathlib import Path

import pytest

from rrfp_async.cli import main
from rrfp_async.trace.records import SCHEMA

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "debugging.md").read_text()
[PROGRAM] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
BLOCKS = re.findall(r"```\n(\$ rrfp.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
@pytest.mark.skipif(SCHEMA < 2, reason="the simulator writes no times yet: schema 1")
def test_the_puzzles_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command of the page in turn; times are virtual, so each word is the same."""
    monkeypatch.chdir(tmp_path)
    exec(PROGRAM, {})
    assert len(BLOCKS) >= 8
    for block in BLOCKS:
        lines = block.splitlines()
        commands = [line[2:] for line in lines if line.startswith("$ ")]
        shown = "\n".join(line for line in lines if not line.startswith("$ "))
        printed = ""
        for command in commands:
            assert main(shlex.split(command)[1:]) == 0, command
            printed = "\n".join(map(str.rstrip, capsys.readouterr().out.splitlines()))
        for part in shown.split("\n...\n"):
            assert part in printed, commands

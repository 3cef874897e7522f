"""The README's programs run as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rrfp_async.ids import TaskId

ROOT = Path(__file__).parents[2]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.multiprocess
def test_the_program_of_the_readme_prints_one_loss_four_times(tmp_path: Path) -> None:
    """The first program, run as a script, trains and every rank has the same loss."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAMS[0])
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    losses = done.stdout.strip().strip("[]").split(", ")
    assert len(losses) == 4
    assert len(set(losses)) == 1
    assert 0.0 < float(losses[0]) < 10.0


def test_the_hint_order_of_the_readme_is_a_valid_setting() -> None:
    """The second program builds a Config whose hint ranks backwards first, even before odd."""
    names: dict[str, object] = {}
    exec(PROGRAMS[1], names)
    tasks = [TaskId.parse(word) for word in ("0F1", "0F2", "0B3")]
    ranked = sorted(tasks, key=names["config"].hint.rank)
    assert [str(task) for task in ranked] == ["0B3", "0F2", "0F1"]


def test_the_readme_names_every_room() -> None:
    """The picture of the house and the package agree."""
    readme = (ROOT / "README.md").read_text()
    for path in (ROOT / "rrfp_async").iterdir():
        if not path.name.startswith("_") and path.name != "py.typed":
            assert path.name in readme, path.name

"""The README's programs run as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rrfp_async.ids import TaskId

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROGRAM, LAST_LINE, HINT = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def losses_of(command: list[str]) -> set[float]:
    """Every loss that a program printed, as a list or a line each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=50, check=True, env=environment
    )
    return set(map(float, re.findall(r"\d+\.\d+", done.stdout)))


@pytest.mark.multiprocess
def test_the_program_of_the_readme_prints_the_same_loss_on_every_rank(tmp_path: Path) -> None:
    """Run as a script without a warning, all ranks in one process."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    assert len(losses_of([sys.executable, "-W", "error", str(script)])) == 1


@pytest.mark.multiprocess
@pytest.mark.slow
def test_with_the_last_line_for_torchrun_the_program_runs_in_processes(tmp_path: Path) -> None:
    """The same program, its last line replaced as the README says."""
    script = tmp_path / "program.py"
    lines = PROGRAM.strip().splitlines()
    assert lines[-1].startswith("print(")
    lines[-1] = LAST_LINE.strip()
    script.write_text("\n".join(lines))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    assert len(losses_of([*launcher, str(script)])) == 1


def test_the_hint_order_of_the_readme_is_a_valid_setting() -> None:
    """The second program builds a Config whose hint ranks backwards first, even before odd."""
    names: dict[str, object] = {}
    exec(HINT, names)
    tasks = [TaskId.parse(word) for word in ("0F1", "0F2", "0B3")]
    ranked = sorted(tasks, key=names["config"].hint.rank)
    assert [str(task) for task in ranked] == ["0B3", "0F2", "0F1"]


def test_the_readme_names_every_room() -> None:
    """The picture of the house and the package agree."""
    for path in (ROOT / "rrfp_async").iterdir():
        if not path.name.startswith("_") and path.name != "py.typed":
            assert path.name in README, path.name

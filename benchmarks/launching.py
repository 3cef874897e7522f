"""The processes of a benchmark: the same module again, once or as the ranks of a torchrun."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def start(module: str, *arguments: str, ranks: int | None = None) -> int:
    """Run `python -m benchmarks.{module}`, as so many ranks if that is given; its exit status."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *torchrun, "-m", f"benchmarks.{module}", *arguments]
    return subprocess.call(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def rows_from(module: str, *arguments: str, ranks: int | None = None) -> list[dict[str, Any]]:
    """The same; the rows that it writes, as JSON, to the file that it is given as `--out`.

    Raises:
        RuntimeError: If it failed. It has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        status = start(module, *arguments, "--out", str(out), ranks=ranks)
        if status:
            raise RuntimeError(f"benchmarks.{module} ended with {status}: see above")
        rows: list[dict[str, Any]] = json.loads(out.read_text())
        return rows

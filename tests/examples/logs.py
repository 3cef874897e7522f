"""Dispatch logs and schedule files of the example's four ranks and eight microbatches."""

import json
from pathlib import Path

RANKS = 4
MICROBATCHES = 8


def dispatched(folder: Path) -> list[list[tuple[int, str]]]:
    """Step and task of every dispatch, rank by rank."""
    logs = [(folder / f"rank{rank}.jsonl").read_text().splitlines() for rank in range(RANKS)]
    return [[(r["step"], r["task"]) for r in map(json.loads, log)] for log in logs]


def write_csv(path: Path) -> Path:
    """A schedule of nobody's: 1F1B with two more forwards ahead, and idle slots."""
    rows = []
    for rank in range(RANKS):
        ahead = min(MICROBATCHES, RANKS - rank + 2)
        row = [""] * rank + [f"{rank}F{index}" for index in range(ahead)]
        for index in range(MICROBATCHES):
            row.append(f"{rank}B{index}")
            if ahead + index < MICROBATCHES:
                row.append(f"{rank}F{ahead + index}")
        rows.append(",".join(row))
    path.write_text("\n".join(rows) + "\n")
    return path

"""Dispatch logs and schedule files of the example's four ranks and eight microbatches."""

from pathlib import Path

from tests.logs import records

RANKS = 4
MICROBATCHES = 8


def dispatched(folder: Path) -> list[list[tuple[int, str]]]:
    """Step and task of every dispatch, rank by rank."""
    logs = [records(folder, rank, "dispatch") for rank in range(RANKS)]
    return [[(record["step"], record["task"]) for record in log] for log in logs]


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

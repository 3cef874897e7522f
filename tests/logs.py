"""The logs of a run, as tests read them."""

import json
from pathlib import Path
from typing import Any


def records(folder: Path, rank: int, event: str | None = None) -> list[dict[str, Any]]:
    """The lines of a rank's log, those of one kind if it is given, in order."""
    lines = (folder / f"rank{rank}.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [record for record in found if event is None or record["event"] == event]


def dispatched(folder: Path, rank: int) -> list[str]:
    """The tasks that a rank dispatched, in order."""
    return [record["task"] for record in records(folder, rank, "dispatch")]

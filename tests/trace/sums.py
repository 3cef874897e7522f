"""What must hold of the times in any log."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.logs import records

Line = dict[str, Any]


def spans(folder: Path, rank: int, event: str, step: int = 0) -> list[Line]:
    """The spans of a step, in order of time."""
    found = [line for line in records(folder, rank, event) if line["step"] == step]
    return sorted(found, key=lambda span: span["start_s"])


def total_s(lines: list[Line]) -> float:
    return sum(line["end_s"] - line["start_s"] for line in lines)


def check_sums(folder: Path, ranks: int, steps: int, *, wakes_s: float) -> None:
    """On every rank and step the parts sum to the step, and the spans to the parts.

    Args:
        folder: The logs.
        ranks: How many.
        steps: How many.
        wakes_s: What idle spans may differ from the blocking time by, for each span of the step.
    """
    for rank in range(ranks):
        begins, ends = records(folder, rank, "step_begin"), records(folder, rank, "step_end")
        assert [line["step"] for line in begins] == [line["step"] for line in ends]
        assert len(ends) == steps
        for begin, end in zip(begins, ends, strict=True):
            step, step_s = end["step"], end["step_s"]
            parts = ("compute_s", "blocking_s", "coordination_s", "other_s")
            assert sum(end[part] for part in parts) == pytest.approx(step_s, rel=1e-3, abs=1e-8)
            assert all(end[part] >= -1e-9 for part in parts)
            assert end["time_s"] - begin["time_s"] == pytest.approx(step_s, abs=1e-6)
            tasks, idle = (spans(folder, rank, event, step) for event in ("task", "idle"))
            assert total_s(tasks) == pytest.approx(end["compute_s"], rel=1e-3, abs=1e-6)
            waits = 1 + len(records(folder, rank, "transfer"))
            assert abs(total_s(idle) - end["blocking_s"]) <= wakes_s * waits + 1e-6
            both = sorted(tasks + idle, key=lambda span: (span["start_s"], span["end_s"]))
            for before, after in pairwise(both):
                assert before["end_s"] <= after["start_s"] + 2e-9, "two spans overlap"

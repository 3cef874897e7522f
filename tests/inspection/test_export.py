"""`rrfp export --perfetto` and `rrfp compare`."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.inspection.conftest import Ended
from tests.inspection.planted import Planted, tables

Rrfp = Callable[..., Ended]


@pytest.fixture
def planted() -> Planted:
    return Planted(tables(3, 4))


@pytest.fixture
def events(planted: Planted, rrfp: Rrfp, tmp_path: Path) -> list[dict[str, Any]]:
    """What is exported of two steps."""
    planted.write(tmp_path / "trace", steps=2)
    ended = rrfp("export", tmp_path / "trace", "--perfetto", tmp_path / "trace.json")
    assert (ended.status, ended.out, ended.err) == (0, "", "")
    exported = json.loads((tmp_path / "trace.json").read_text())
    found: list[dict[str, Any]] = exported["traceEvents"]
    return found


def test_every_task_is_a_slice_of_its_rank(events: list[dict[str, Any]], planted: Planted) -> None:
    """At its time in microseconds, with the reason of its choice."""
    tasks = [e for e in events if e["ph"] == "X" and e["cat"] != "idle"]
    assert Counter(e["name"] for e in tasks) == dict.fromkeys(planted.spans, 2)
    for event in tasks[: len(planted.spans)]:
        start_s, end_s = planted.spans[event["name"]]
        assert event["pid"] == int(event["name"][0])
        assert event["ts"] == pytest.approx(start_s * 1e6, abs=0.01)
        assert event["dur"] == pytest.approx((end_s - start_s) * 1e6, abs=0.01)
        assert "reason" in event["args"]


def test_an_arrow_goes_from_every_sender_to_its_receiver(events: list[dict[str, Any]]) -> None:
    """Each begins inside the task that sent and ends at the start of the one that used it."""
    slices = {
        (e["args"]["step"], e["name"]): e for e in events if e["ph"] == "X" and e["cat"] != "idle"
    }
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == 2 * (2 * 4 + 2 * 4)
    for name, begin in begins.items():
        step, task = name.split()[:2]
        made = slices[int(step), task]
        assert begin["pid"] == made["pid"]
        assert made["ts"] < begin["ts"] < made["ts"] + made["dur"]
        ahead = 1 if "F" in task else -1
        used = slices[int(step), f"{int(task[0]) + ahead}{task[1:]}"]
        assert (ends[name]["pid"], ends[name]["ts"]) == (used["pid"], used["ts"])
        assert ends[name]["bp"] == "e"


def test_transfers_are_asynchronous_and_ended(events: list[dict[str, Any]]) -> None:
    """Both ends of each: they overlap, so they are no slices."""
    begun = Counter(e["id"] for e in events if e["ph"] == "b")
    assert begun == Counter(e["id"] for e in events if e["ph"] == "e")
    assert set(begun.values()) == {1}
    assert len(begun) == 2 * 2 * (2 * 4 + 2 * 4)


def test_a_comparison_shows_what_was_changed(rrfp: Rrfp, tmp_path: Path) -> None:
    """Stage 1's forwards are 1 ms longer in B: nothing else of a task is."""
    Planted(tables(3, 4)).write(tmp_path / "a")
    costs = tables(3, 4)
    costs["forward_s"][1] = [2e-3] * 4
    Planted(costs).write(tmp_path / "b", steps=3)
    found = json.loads(rrfp("compare", tmp_path / "a", tmp_path / "b", "--json").out)
    changed = [
        change for change in found["tasks"] if abs(change["after"] - change["before"]) > 1e-9
    ]
    [change] = changed
    assert change["what"] == "F of stage 1"
    assert change["after"] - change["before"] == pytest.approx(1e-3)
    assert found["sums"][0]["after"] > found["sums"][0]["before"]
    ended = rrfp("compare", tmp_path / "a", tmp_path / "b")
    assert (ended.status, ended.err) == (0, "")
    [line] = [line for line in ended.out.splitlines() if line.startswith("F of stage 1")]
    assert line.split()[4:] == ["1.00", "ms", "2.00", "ms", "1.00", "ms", "2.00"]


def test_runs_of_different_sizes_can_be_compared(rrfp: Rrfp, tmp_path: Path) -> None:
    """What one of them has not is left open."""
    Planted(tables(2, 4)).write(tmp_path / "a")
    Planted(tables(3, 4)).write(tmp_path / "b")
    found = json.loads(rrfp("compare", tmp_path / "a", tmp_path / "b", "--json").out)
    only = [change for change in found["tasks"] if change["before"] is None]
    assert {change["what"] for change in only} == {"F of stage 2", "B of stage 2"}
    assert rrfp("compare", tmp_path / "a", tmp_path / "b").status == 0


@pytest.mark.parametrize(
    "command",
    [
        ("timeline", "--out", "x.png"),
        ("report", "--html", "x.html"),
        ("export", "--perfetto", "x.json"),
    ],
    ids=lambda command: command[0],
)
def test_a_file_in_a_folder_that_is_not_there_is_refused_with_its_option(
    command: tuple[str, str, str], rrfp: Rrfp, tmp_path: Path
) -> None:
    """And so is a folder, before anything is read."""
    name, option, file = command
    ended = rrfp(name, tmp_path, option, tmp_path / "nowhere" / file)
    assert ended.status == 2
    assert f"there is no folder {tmp_path / 'nowhere'}: make it first" in ended.err
    (tmp_path / file).mkdir()
    ended = rrfp(name, tmp_path, option, tmp_path / file)
    assert f"error: {option} {tmp_path / file} is a folder" in ended.err

"""`rrfp report`: the numbers, and that damage hides none of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.inspection.conftest import Ended
from tests.inspection.planted import PARTS, Planted, tables, write_lines

Rrfp = Callable[..., Ended]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four ranks, eight microbatches, two steps; 2F5 is ten times as long, edge 1->2 slow."""
    costs = tables(4, 8)
    costs["forward_s"][2][5] = 10e-3
    costs["activation_delay_s"][1] = [4e-3] * 8
    return Planted(costs).write(tmp_path / "trace", steps=2)


def told(rrfp: Rrfp, folder: Path) -> Any:
    ended = rrfp("report", folder, "--json")
    assert (ended.status, ended.err) == (0, "")
    return json.loads(ended.out)


def test_rows_hold_every_step_and_rank_and_sum_to_the_step(rrfp: Rrfp, folder: Path) -> None:
    """Compute, blocking, coordination and other are all of it, within 0.1 %."""
    rows = told(rrfp, folder)["rows"]
    places = [(row["step"], row["rank"]) for row in rows]
    assert places == [(step, rank) for step in range(2) for rank in range(4)]
    for row in rows:
        assert sum(row[part] for part in PARTS) == pytest.approx(row["step_s"], rel=1e-3)
        assert row["bubble"] == pytest.approx(1 - row["compute_s"] / row["step_s"])
        assert row["peak_in_flight"] == 8
        assert row["decisions"] == 16


def test_the_slow_edge_and_the_slow_task_come_first(rrfp: Rrfp, folder: Path) -> None:
    """Those that were planted, with their times."""
    found = told(rrfp, folder)
    edge = found["edges"][0]
    assert (edge["edge"], edge["gradient"], edge["source"], edge["target"]) == ([1, 2], False, 1, 2)
    assert edge["median_s"] == pytest.approx(4e-3)
    assert {(task["task"], task["rank"]) for task in found["outliers"]} == {("2F5", 2)}
    assert [task["duration_s"] for task in found["outliers"]] == pytest.approx([10e-3] * 2)


def test_the_longest_idle_spans_come_first_with_their_causes(rrfp: Rrfp, folder: Path) -> None:
    """As recorded: what was missing, from which rank."""
    idles = told(rrfp, folder)["idles"]
    lengths = [idle["span"]["end_s"] - idle["span"]["start_s"] for idle in idles]
    assert lengths == sorted(lengths, reverse=True)
    waits = [wait for idle in idles for wait in idle["span"]["waits"]]
    assert all(wait["source"] and wait["edge"] and wait["rank"] is not None for wait in waits)
    assert any(idle["span"]["cause"] == "nothing ready" for idle in idles)


def test_people_are_shown_the_same(rrfp: Rrfp, folder: Path) -> None:
    """Tables: times, idle spans, edges, outliers."""
    ended = rrfp("report", folder)
    assert (ended.status, ended.err) == (0, "")
    for words in ("4 ranks, 2 steps", "Longest idle", "Slowest edges", "1->2", "2F5", "bubble"):
        assert words in ended.out


def test_one_step_can_be_had_alone(rrfp: Rrfp, folder: Path) -> None:
    """And one that is not there is refused, with those that are."""
    rows = json.loads(rrfp("report", folder, "--step", 1, "--json").out)["rows"]
    assert {row["step"] for row in rows} == {1}
    ended = rrfp("report", folder, "--step", 7)
    assert (ended.status, ended.out) == (2, "")
    assert "step 7 is not in" in ended.err
    assert "0 to 1" in ended.err


def test_the_page_is_written_and_asks_for_nothing(rrfp: Rrfp, folder: Path, tmp_path: Path) -> None:
    """One file with the tables, and nothing on the terminal."""
    ended = rrfp("report", folder, "--html", tmp_path / "report.html")
    assert (ended.status, ended.out) == (0, "")
    text = (tmp_path / "report.html").read_text()
    assert "Slowest edges" in text
    assert "http" not in text


def test_many_rows_become_medians_for_people(rrfp: Rrfp, tmp_path: Path) -> None:
    """Seventy rows of two ranks: a line a rank; JSON has each."""
    Planted(tables(2, 1)).write(tmp_path, steps=35)
    ended = rrfp("report", tmp_path)
    assert "medians over the steps" in ended.out
    assert ended.out.count("35 steps") == 1 + 2
    assert len(told(rrfp, tmp_path)["rows"]) == 70


def test_damage_is_noted_and_the_rest_reported(rrfp: Rrfp, folder: Path) -> None:
    """A missing rank, a last line cut off: notes on stderr, rows on stdout, status 0."""
    (folder / "rank3.jsonl").unlink()
    path = folder / "rank0.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    ended = rrfp("report", folder, "--json")
    assert ended.status == 0
    found = json.loads(ended.out)
    assert [row["rank"] for row in found["rows"]] == [0, 1, 2] * 2
    assert [row["step_s"] is None for row in found["rows"]] == [False] * 3 + [True, False, False]
    notes = ended.err.splitlines()
    assert len(notes) == len(found["problems"]) == 2
    assert all(note.startswith("note: rank") for note in notes)


def test_an_empty_folder_ends_with_status_2_and_one_line(rrfp: Rrfp, tmp_path: Path) -> None:
    """From every command that reads."""
    for command in (["report"], ["timeline", "--out", "x.png"], ["explain"], ["compare", tmp_path]):
        ended = rrfp(command[0], tmp_path, *command[1:])
        assert (ended.status, ended.out) == (2, "")
        [line] = ended.err.splitlines()
        assert line.startswith("error: ")
        assert "holds no rank*.jsonl" in line


def test_schema_1_still_counts_decisions(rrfp: Rrfp, tmp_path: Path) -> None:
    """No times, so none are made up; what needs them says so."""
    made = {
        "event": "dispatch",
        "schema": 1,
        "step": 0,
        "rank": 0,
        "stage": 0,
        "task": "0F0",
        "hint_position": 0,
        "ready": 1,
        "passed_over": [],
        "reason": "first in the hint order",
        "waited_s": 0.0,
    }
    write_lines(tmp_path, 0, [made])
    [row] = json.loads(rrfp("report", tmp_path, "--json").out)["rows"]
    assert (row["decisions"], row["step_s"], row["bubble"]) == (1, None, None)
    assert rrfp("report", tmp_path).status == 0
    for command in (["explain"], ["timeline", "--out", tmp_path / "x.svg"]):
        ended = rrfp(command[0], tmp_path, *command[1:])
        assert ended.status == 2
        assert "record again" in ended.err

"""Reading a folder: what is damaged is told, and the rest is there."""

import json
from pathlib import Path

import pytest

from rrfp_async.ids import TaskId
from rrfp_async.inspection.reading import read_run
from tests.inspection.planted import Planted, tables, write_lines


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    """Three ranks, four microbatches, two steps."""
    planted = Planted(tables(3, 4))
    planted.write(tmp_path, steps=2)
    return planted


def test_a_whole_trace_is_read_without_a_word(planted: Planted, tmp_path: Path) -> None:
    """Every task of every rank and step, at its time since the first step began."""
    run = read_run(tmp_path)
    assert (run.problems, list(run.ranks), run.step_numbers()) == ((), [0, 1, 2], [0, 1])
    for rank in range(3):
        step = run.ranks[rank].steps[0]
        read = {str(task): (span.start_s, span.end_s) for task, span in step.spans.items()}
        wanted = {task: planted.spans[task] for task in planted.orders[rank]}
        assert read == {task: pytest.approx(span) for task, span in wanted.items()}
        assert step.ended is not None
        assert step.ended.time_s == pytest.approx(planted.makespan_s)


def test_clocks_are_aligned(tmp_path: Path) -> None:
    """Whatever each rank's clock shows, the times are those of one clock."""
    Planted(tables(3, 2), offsets_s=(0.0, 50.0, -70.0)).write(tmp_path / "apart")
    Planted(tables(3, 2)).write(tmp_path / "together")
    apart, together = read_run(tmp_path / "apart"), read_run(tmp_path / "together")
    for rank in range(3):
        spans, wanted = (run.ranks[rank].steps[0].spans for run in (apart, together))
        for task, span in spans.items():
            assert span.start_s == pytest.approx(wanted[task].start_s, abs=1e-9)


def test_no_folder_and_an_empty_one_are_refused(tmp_path: Path) -> None:
    """Each says what to give."""
    with pytest.raises(ValueError, match="nowhere is no folder: give the trace_dir"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no rank\*\.jsonl: give the folder"):
        read_run(tmp_path)
    (tmp_path / "rank0.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no record of a step"):
        read_run(tmp_path)


def test_a_last_line_cut_off_is_told_and_left_out(planted: Planted, tmp_path: Path) -> None:
    """The lines before it are read."""
    path = tmp_path / "rank1.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    run = read_run(tmp_path)
    [problem] = run.problems
    last = len(whole.splitlines())
    assert problem.startswith(f"rank1.jsonl, line {last} is cut off")
    assert len(run.ranks[1].steps[1].spans) == 8
    assert run.ranks[1].steps[1].ended is None
    assert run.last_step() == 0


def test_a_damaged_line_is_told_with_its_number(planted: Planted, tmp_path: Path) -> None:
    """No JSON, bytes that are no text, a field that lacks, a task that is none: one by one."""
    path = tmp_path / "rank2.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    bad = [
        b"{nonsense\n",
        b"\xff\xfe\n",
        b"[1]\n",
        b'{"event": "task", "step": 0, "task": "2F0"}\n',
        b'{"event": "task", "step": 0, "task": "2X0", "start_s": 1.0, "end_s": 2.0}\n',
    ]
    path.write_bytes(b"".join([*lines[:3], *bad, *lines[3:]]))
    run = read_run(tmp_path)
    assert [problem.split(" cannot")[0] for problem in run.problems] == [
        f"rank2.jsonl, line {number}" for number in range(4, 9)
    ]
    assert "lacks the field 'start_s'" in run.problems[3]
    assert "task '2X0' is no task" in run.problems[4]
    assert len(run.ranks[2].steps[0].spans) == 8


def test_a_missing_rank_is_named(planted: Planted, tmp_path: Path) -> None:
    """The others are read."""
    (tmp_path / "rank1.jsonl").unlink()
    run = read_run(tmp_path)
    [problem] = run.problems
    assert problem.startswith("rank1.jsonl not found, though the run has 3 ranks")
    assert list(run.ranks) == [0, 2]


def test_a_newer_schema_is_told_and_read_as_far_as_known(planted: Planted, tmp_path: Path) -> None:
    """Unknown events are counted, unknown fields passed over."""
    lines = planted.lines(0)
    lines[0] |= {"schema": 3, "colour": "red"}
    lines.insert(2, {"event": "weather", "step": 0, "sun": True})
    write_lines(tmp_path, 0, lines)
    run = read_run(tmp_path)
    newer, unknown = run.problems
    assert "rank0.jsonl is of schema 3, this rrfp knows 2" in newer
    assert "1 of 'weather'" in unknown
    assert len(run.ranks[0].steps[0].spans) == 8


def test_schema_1_has_decisions_but_no_times(tmp_path: Path) -> None:
    """As version 0.1 wrote them before."""
    line = {
        "event": "dispatch",
        "schema": 1,
        "step": 0,
        "rank": 0,
        "stage": 0,
        "task": "0F0",
        "hint_position": None,
        "ready": 1,
        "passed_over": [],
        "reason": "first in the hint order",
        "waited_s": 0.0,
    }
    write_lines(tmp_path, 0, [line, {**line, "event": "void", "task": "0B0"}])
    run = read_run(tmp_path)
    [problem] = run.problems
    assert "rank0.jsonl is of schema 1: it has decisions but no times" in problem
    assert [made.task for made in run.ranks[0].steps[0].decisions] == [TaskId.parse("0F0")]
    assert not run.timed


def test_lost_records_are_told(planted: Planted, tmp_path: Path) -> None:
    """The writer's own count."""
    with (tmp_path / "rank0.jsonl").open("a") as file:
        file.write(json.dumps({"event": "lost", "records": 17}) + "\n")
    [problem] = read_run(tmp_path).problems
    assert problem.startswith("rank0.jsonl lacks 17 records")


@pytest.mark.parametrize("text", ["hello\n", '{"a": 1}\n', ""])
def test_a_file_that_is_no_trace_is_not_taken_for_an_old_one(tmp_path: Path, text: str) -> None:
    """It has no decisions that could be shown."""
    (tmp_path / "rank0.jsonl").write_text(text)
    with pytest.raises(ValueError, match="holds no record of a step") as refused:
        read_run(tmp_path)
    assert "decisions" not in str(refused.value)

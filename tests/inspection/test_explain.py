"""`rrfp explain`: planted faults are named as the first cause of the waits that they make."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from rrfp_async.ids import Edge, TaskId
from rrfp_async.inspection.critical_path import Fault, FirstCause
from rrfp_async.inspection.explain import Story, explain
from rrfp_async.inspection.lines import IdleSpan
from rrfp_async.inspection.reading import read_run
from tests.inspection.conftest import Ended
from tests.inspection.planted import Line, Planted, by_event, idle_line, tables, write_lines

Rrfp = Callable[..., Ended]


def longest_after(folder: Path, rank: int, after_s: float) -> IdleSpan:
    """The longest idle span of a rank that begins later, its end on the drain left out."""
    [step] = read_run(folder).ranks[rank].steps.values()
    found = [idle for idle in step.idles if idle.start_s > after_s and idle.cause != "others"]
    return max(found, key=lambda idle: idle.duration_s)


def cause_at(folder: Path, rank: int, idle: IdleSpan) -> FirstCause:
    middle_s = (idle.start_s + idle.end_s) / 2
    cause = explain(read_run(folder), rank=rank, at_s=middle_s).cause
    assert cause is not None
    return cause


def test_one_slow_task_is_found_from_two_ranks_away(tmp_path: Path) -> None:
    """2F5 takes 15 ms for 1 ms: rank 3 waits for it, and so does rank 0, for gradients."""
    costs = tables(4, 12)
    costs["forward_s"][2][5] = 15e-3
    planted = Planted(costs)
    planted.write(tmp_path)
    for rank in (3, 1, 0):
        cause = cause_at(tmp_path, rank, longest_after(tmp_path, rank, planted.spans["2F5"][0]))
        assert (cause.fault, cause.rank, str(cause.task)) == (Fault.SLOW_TASK, 2, "2F5")
        assert (cause.took_s, cause.usual_s) == (pytest.approx(15e-3), pytest.approx(1e-3))


def test_one_slow_transfer_is_found(tmp_path: Path) -> None:
    """What 1F4 made is 12 ms on its way, others 0.2 ms."""
    costs = tables(4, 12)
    costs["activation_delay_s"][1][4] = 12e-3
    planted = Planted(costs)
    planted.write(tmp_path)
    for rank in (2, 3):
        cause = cause_at(tmp_path, rank, longest_after(tmp_path, rank, planted.spans["1F4"][0]))
        assert (cause.fault, cause.edge, cause.source) == (Fault.SLOW_TRANSFER, Edge(1, 2), 1)
        assert (str(cause.task), cause.rank) == ("1F4", 2)
        assert cause.took_s == pytest.approx(12e-3)


def test_a_link_that_is_always_slow_is_found(tmp_path: Path) -> None:
    """Every gradient from stage 2 to stage 1 takes 6 ms."""
    costs = tables(4, 12)
    costs["gradient_delay_s"][2] = [6e-3] * 12
    planted = Planted(costs)
    planted.write(tmp_path)
    cause = cause_at(tmp_path, 1, longest_after(tmp_path, 1, planted.spans["1F0"][0]))
    assert (cause.fault, cause.edge, cause.source, cause.rank) == (
        Fault.SLOW_TRANSFER,
        Edge(1, 2),
        2,
        1,
    )


def test_a_rank_that_is_always_slow_is_found(tmp_path: Path) -> None:
    """Stage 2 takes four times as long for everything: the ranks beside it wait for it."""
    costs = tables(4, 12)
    for name in ("forward_s", "backward_input_s", "weight_s"):
        costs[name][2] = [4e-3] * 12
    planted = Planted(costs)
    planted.write(tmp_path)
    for rank in (1, 3):
        cause = cause_at(tmp_path, rank, longest_after(tmp_path, rank, planted.spans["3B2"][0]))
        assert (cause.fault, cause.rank) == (Fault.SLOW_STAGE, 2)
        assert cause.task is not None
        assert cause.task.stage == 2


def test_a_tight_limit_is_found(tmp_path: Path) -> None:
    """Limit 2 on four stages: the first rank has forwards ready that it may not run."""
    Planted(tables(4, 12), limit=2).write(tmp_path)
    idle = longest_after(tmp_path, 0, 0.0)
    cause = cause_at(tmp_path, 0, idle)
    assert (cause.fault, cause.rank) == (Fault.LIMIT, 0)
    assert cause.idle is not None
    assert (cause.idle.in_flight, cause.idle.bound) == (2, 2)
    assert str(cause.idle.ready[0]) == "0F2"


def test_where_nothing_is_slow_nothing_is_blamed(tmp_path: Path) -> None:
    """Filling the pipeline."""
    Planted(tables(4, 12)).write(tmp_path)
    story = explain(read_run(tmp_path), rank=3, at_s=1e-3)
    assert story.cause is not None
    assert story.cause.fault is Fault.NOTHING
    assert "0F0 on rank 0 was the first there" in " ".join(story.lines)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The slow task again."""
    costs = tables(4, 8)
    costs["forward_s"][2][5] = 15e-3
    return Planted(costs).write(tmp_path / "trace", steps=2)


def test_the_story_tells_what_was_missing_and_the_way_back(rrfp: Rrfp, folder: Path) -> None:
    """In the words of the records: the task, its edge, the rank, the task before, the cause."""
    ended = rrfp("explain", folder, "--task", "3F5")
    assert (ended.status, ended.err) == (0, "")
    for words in (
        "3F5 ran on rank 3 in step 1",
        "3F5 lacked its activation from 2F5 on rank 2 (edge 2->3)",
        "Ranked higher, but not ready or not admissible: 3B5, 3F6",
        "- 3F5 on rank 3 waited for an activation: 2F5 of rank 2",
        "First cause: a slow task: 2F5 on rank 2 took 15.00 ms instead of 1.00 ms.",
    ):
        assert words in ended.out
    assert "in step 0" in rrfp("explain", folder, "--task", "3F5", "--step", "0").out


def test_without_a_question_the_longest_wait_is_told(rrfp: Rrfp, folder: Path) -> None:
    """Of the last step."""
    ended = rrfp("explain", folder)
    assert ended.out.startswith("The longest wait: Rank ")
    assert "2F5 on rank 2 took 15.00 ms" in ended.out


def test_after_its_last_task_a_rank_waits_for_the_others(tmp_path: Path) -> None:
    """The story goes on with the task that ended last."""
    planted = Planted(tables(4, 4))
    planted.write(tmp_path)
    story = explain(read_run(tmp_path), rank=3, at_s=planted.makespan_s - 1e-4)
    assert "The last task of the step was 0B3 on rank 0" in " ".join(story.lines)


UNANSWERED = [
    (["--at", "0.001"], "give --rank too"),
    (["--rank", "9", "--at", "0.001"], "rank 9 has no file"),
    (["--rank", "9"], "rank 9 has no file in"),
    (["--rank", "9", "--at", "0.001"], "it holds ranks 0 to 3"),
    (["--rank", "0", "--at", "99"], "rank 0 recorded nothing at 99"),
    (["--rank", "0", "--at", "0.001", "--step", "1"], "rank 0 recorded nothing of step 1 at 0.001"),
    (["--task", "2I5"], "stage 2 ran B, F of microbatches up to 7"),
    (["--task", "7F5", "--step", "0"], "what is recorded there is of stages 0, 1, 2, 3"),
    (["--task", "2X5"], "task '2X5' is no task"),
    (["--task", "7F5"], "task 7F5 is not in step 1"),
    (["--task", "2F5", "--step", "5"], "step 5 is not in"),
    (["--task", "2F5", "--rank", "1"], "task 2F5 is not in step 1 on rank 1"),
    (["--task", "2F5", "--rank", "2", "--at", "1"], "two questions"),
]


@pytest.mark.parametrize(
    ("question", "saying"), UNANSWERED, ids=[" ".join(question) for question, _ in UNANSWERED]
)
def test_a_question_without_an_answer_is_refused(
    question: list[str], saying: str, rrfp: Rrfp, folder: Path
) -> None:
    """Status 2, one line."""
    ended = rrfp("explain", folder, *question)
    assert (ended.status, ended.out) == (2, "")
    [line] = ended.err.splitlines()
    assert saying in line


def failed(planted: Planted, rank: int, *, lost: str) -> list[Line]:
    """What a rank writes whose run stalls because `lost` never leaves its rank."""
    gone_s = planted.spans[lost][1]
    kept = [line for line in planted.lines(rank) if line.get("end_s", 0.0) <= 100.0 + gone_s]
    kept = [line for line in kept if line["event"] in ("run", "step_begin", "task", "idle")]
    if rank == int(lost[0]) + 1:
        wait = {"task": f"{rank}{lost[1:]}", "for": "activation", "of": lost, "rank": rank - 1}
        idle = idle_line(100.0 + gone_s, 101.0, "nothing ready")
        kept.append(idle | {"step": 0, "waits": [wait | {"edge": [rank - 1, rank]}]})
    failure = {"event": "failure", "step": 0, "time_s": 101.0, "rank": 0, "stage": None}
    cause = "StallError: nothing progressed on any rank for 1.0 s"
    report = f"nothing ready; waits for an activation; last completed on rank {rank}"
    end = {"task": None, "microbatch": None, "cause": cause, "report": report}
    return [*kept, failure | end]


def test_a_failed_run_is_told_with_its_stall_reports(rrfp: Rrfp, tmp_path: Path) -> None:
    """First cause, every rank's report, and whose tensors never came."""
    planted = Planted(tables(3, 4))
    for rank in range(3):
        write_lines(tmp_path, rank, failed(planted, rank, lost="1F2"))
    ended = rrfp("explain", tmp_path)
    assert (ended.status, ended.err) == (0, "")
    assert "failed at 1.000000 s on rank 0: StallError: nothing progressed" in ended.out
    for rank in range(3):
        assert f"Rank {rank} reported: nothing ready; waits for an activation" in ended.out
    assert "Rank 2 waited at the end: 2F2 lacked its activation from 1F2 on rank 1" in ended.out
    assert "Rank 1 ran 1F2 until" in ended.out
    assert "its transfer never ended" in ended.out
    never_ran = rrfp("explain", tmp_path, "--task", "2F2")
    assert "2F2 did not run in step 0" in never_ran.out


def test_a_step_before_the_one_that_failed_can_be_asked_for(rrfp: Rrfp, tmp_path: Path) -> None:
    """Its longest wait, or a moment of it: not the failure, which report tells too."""
    planted = Planted(tables(3, 4))
    planted.write(tmp_path, steps=2)
    for rank in range(3):
        path = tmp_path / f"rank{rank}.jsonl"
        *kept, end = path.read_text().splitlines(keepends=True)
        assert '"step_end"' in end
        failure = failed(planted, rank, lost="1F2")[-1] | {"step": 1, "time_s": 102.0}
        path.write_text("".join([*kept, json.dumps(failure) + "\n"]))
    assert rrfp("explain", tmp_path, "--step", 0).out.startswith("The longest wait: Rank ")
    assert "in step 0" in rrfp("explain", tmp_path, "--rank", 1, "--at", 0.003).out
    for asked in ([], ["--step", 1]):
        assert rrfp("explain", tmp_path, *asked).out.startswith("Step 1 failed at ")
        shown = rrfp("report", tmp_path, *asked).out
        assert "Step 1 failed at " in shown
        assert f"More: rrfp explain {tmp_path}" in shown.replace("\n", "")
    assert "failed at" not in rrfp("report", tmp_path, "--step", 0).out
    assert "Step 1 failed" in json.loads(rrfp("report", tmp_path, "--json").out)["failure"]


def test_a_task_that_failed_is_told_without_the_waits_it_made(rrfp: Rrfp, tmp_path: Path) -> None:
    """Who waited then says nothing: the task is known. Long reports are cut, but for --rank."""
    planted = Planted(tables(3, 4))
    for rank in range(3):
        *lines, end = failed(planted, rank, lost="1F2")
        cause = {
            "rank": 1,
            "task": "1F2",
            "cause": "RuntimeError: planted",
            "report": "word " * 200,
        }
        write_lines(tmp_path, rank, [*lines, end | cause])
    told = rrfp("explain", tmp_path).out
    assert "on rank 1, in task 1F2: RuntimeError: planted." in told
    assert "waited at the end" not in told
    assert told.count("... (--rank for all)") == 3
    assert rrfp("explain", tmp_path, "--rank", 2).out.count("... (--rank for all)") == 2


def test_a_rank_killed_without_a_word_is_named(rrfp: Rrfp, tmp_path: Path) -> None:
    """It has a file, and no failure in it."""
    planted = Planted(tables(3, 4))
    for rank in (0, 2):
        write_lines(tmp_path, rank, failed(planted, rank, lost="1F2"))
    write_lines(tmp_path, 1, planted.lines(1)[:6])
    assert "Rank 1 wrote no failure: it was killed or cut off." in rrfp("explain", tmp_path).out


def test_a_backward_that_nothing_wanted_is_told(tmp_path: Path) -> None:
    """Voided, not missing."""
    planted = Planted(tables(2, 2))
    planted.write(tmp_path)
    lines = [line for line in planted.lines(0) if line.get("task") != "0B1"]
    lines.insert(-1, {"event": "void", "schema": 2, "step": 0, "rank": 0, "task": "0B1"})
    write_lines(tmp_path, 0, lines)
    story: Story = explain(read_run(tmp_path), task=TaskId.parse("0B1"))
    assert "nothing wanted a gradient of it" in story.lines[0]


def test_the_planted_traces_are_what_they_say(tmp_path: Path) -> None:
    """The generator itself: spans of a rank do not overlap, idle spans and tasks fill the step."""
    planted = Planted(tables(4, 8), limit=3)
    for rank in range(4):
        found = by_event(json.loads(json.dumps(planted.lines(rank))))
        spans = sorted((s["start_s"], s["end_s"]) for s in found["task"] + found["idle"])
        for (_, end_s), (start_s, _) in pairwise(spans):
            assert start_s == pytest.approx(end_s, abs=1e-9)

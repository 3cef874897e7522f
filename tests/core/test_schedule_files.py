"""Schedules that torch.distributed.pipelining wrote: CSV files, and its schedule objects."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from rrfp_async.config import Config
from rrfp_async.hints import Schedule, resolve_hint
from rrfp_async.ids import TaskId
from rrfp_async.topology import Topology
from tests.core.fixed_order import Cores, tasks_of
from tests.core.torch_stages import built, stage
from tests.core.words import tasks, words

ROWS = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
GOOD = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"
PLAIN = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def write(folder: Path, text: str | bytes, name: str = "schedule.csv") -> str:
    """A CSV file with `text`; returns the hint that names it."""
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return f"csv:{path}"


def listed(hint: Any, microbatches: int = 2, ranks: int = 2) -> list[list[TaskId]]:
    """The lists that a hint comes to, checked for a pipeline."""
    config = Config(microbatches=microbatches, hint=hint)
    config.check_order(Topology(ranks))
    assert isinstance(config.order, Schedule)
    return [list(row) for row in config.order.orders(Topology(ranks), microbatches, 0)]


def refused(hint: Any, **settings: Any) -> str:
    """The message that two ranks refuse a hint with."""
    with pytest.raises(ValueError, match=r".") as caught:
        Config(**{"microbatches": 2, "hint": hint, **settings}).check_order(Topology(2))
    return str(caught.value)


def published(name: str, microbatches: int, ranks: int) -> list[list[TaskId]]:
    """Our own lists."""
    return listed(name, microbatches, ranks)


# -- CSV files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        GOOD,
        GOOD.replace("\n", "\r\n"),
        GOOD + "\n",
        GOOD + "\n\r\n\n",
        GOOD.rstrip("\n"),
        "\ufeff" + GOOD,
        PLAIN.replace(",", " , "),
        PLAIN.replace("0F1", '"0F1"'),
    ],
)
def test_a_csv_is_read_row_by_row_and_blank_cells_are_idle_slots(tmp_path: Path, text: str) -> None:
    """Neither line ends, a byte order mark, blank last lines, spaces nor quotes matter."""
    assert [words(row) for row in listed(write(tmp_path, text))] == ROWS


def test_communication_is_left_out(tmp_path: Path) -> None:
    """Every such action of torch: what is sent and unsharded when follows readiness here."""
    first = "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD"
    second = "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD"
    assert [words(row) for row in listed(write(tmp_path, f"{first}\n{second}\n"))] == ROWS


@pytest.mark.parametrize("cell", ["(0F1;0B0)OVERLAP_F_B", "( 0F1 ; 0B0 )OVERLAP_F_B"])
def test_overlapped_actions_are_listed_one_after_the_other(tmp_path: Path, cell: str) -> None:
    """In the order in which they stand."""
    hint = write(tmp_path, PLAIN.replace("0F1,0B0", cell))
    assert [words(row) for row in listed(hint)] == ROWS


@pytest.mark.parametrize(
    "word",
    [
        "0f1", "F1", "0F", "0F-1", "0F1.0", "0Q1", "2F5x", "rank", "0F1;0B0",
        "(0F1;0Q0)OVERLAP_F_B", "(0F1;0B0)", "0SEND_X1", "0SEND_F1x", "None", "0F\u0661", "nan",
    ],
)  # fmt: skip
def test_a_cell_that_is_no_action_is_refused(tmp_path: Path, word: str) -> None:
    """The error names file, row, cell, the word, and how one is written."""
    message = refused(write(tmp_path, GOOD.replace("0B1", word)))
    assert message.startswith(f"{tmp_path / 'schedule.csv'}, row 0, cell 5: ")
    assert ("'0Q0'" if "OVERLAP" in word else repr(word)) in message
    assert "write stage, kind (F, B, I, W or R) and microbatch, such as '2F5'" in message


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (PLAIN.replace(",1B1", ""), "row 1: task 1B1 is missing: list every task once"),
        (PLAIN.replace("0F0,", ""), "row 0: task 0F0 is missing: list every task once"),
        (
            PLAIN.replace("1B1", "1B0"),
            "row 1, entry 3: task 1B0, but it stands there a second time: list every task once",
        ),
        (
            PLAIN.replace("1F1", "0F1"),
            "row 1, entry 2: task 0F1, but rank 1 owns the stages [1]: list a task on its own rank",
        ),
        (
            PLAIN.replace("0B1", "0B2"),
            "row 0, entry 3: task 0B2, but the step has the microbatches 0 to 1: list only those",
        ),
        (
            PLAIN.replace("0F1", f"0F{10**30}"),
            f"row 0, entry 1: task 0F{10**30}, but the step has the microbatches 0 to 1: list",
        ),
        (
            PLAIN.replace("0B0,0B1", "0I0,0W0,0I1"),
            "row 0: task 0W1 is missing: list every task once",
        ),
        (
            PLAIN.replace("0B0", "0R0"),
            "row 0, entry 2: task 0R0, but the stage has tasks of the kinds F, B: list only those",
        ),
        (PLAIN.splitlines()[0], "1 lists for 2 ranks: give one row for each rank"),
        (PLAIN + "2F0,2B0\n", "3 lists for 2 ranks: give one row for each rank"),
    ],
)
@pytest.mark.parametrize("binding", [False, True])
def test_a_csv_with_a_task_that_cannot_be_is_refused(
    tmp_path: Path, text: str, fault: str, binding: bool
) -> None:
    """Missing, doubled, impossible: the error names file, row, task, rule and remedy."""
    message = refused(write(tmp_path, text), binding=binding)
    assert message.startswith(str(tmp_path / "schedule.csv"))
    assert fault in message


def test_a_csv_is_checked_by_the_rules_of_a_binding_list_only_where_it_binds(
    tmp_path: Path,
) -> None:
    """An order that waits for itself may rank; a limit below its peak may bound it."""
    hint = write(tmp_path, "0F0,0B1,0F1,0B0\n1F0,1F1,1B0,1B1\n")
    Config(microbatches=2, hint=hint, limit=1).check_order(Topology(2))
    circle = refused(hint, binding=True, deterministic=False)
    assert "schedule.csv, row 0, entry 1: 0B1 waits for 0F1, which the same row lists" in circle
    order = refused(hint, binding=True)
    assert "schedule.csv, row 0: 0B1 stands before 0B0" in order
    tight = refused(write(tmp_path, PLAIN), binding=True, limit=1)
    assert tight.startswith("limit=1 is below 2")


@pytest.mark.parametrize(
    "content", [GOOD.encode("utf-16"), b"\xff\xfe\x00", b"x" * 200_000, None, "folder"]
)
def test_a_csv_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | str | None) -> None:
    """Not text, not CSV, not there, a folder: the error names the hint and what to give."""
    path = tmp_path / "schedule.csv"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    assert f"hint 'csv:{path}' cannot be read (" in (message := refused(f"csv:{path}"))
    assert message.endswith("name a CSV file")


@pytest.mark.parametrize(
    "name", ["", "\0", "a\0b.csv", "x" * 300], ids=["none", "null", "null within", "long"]
)
def test_a_name_that_no_file_can_have_is_refused_as_one_that_cannot_be_read(name: str) -> None:
    """Whatever the system says to it, the error names the hint."""
    assert "hint 'csv:" in refused(f"csv:{name}")


@pytest.mark.parametrize("text", ["", "\n", "\r\n\n\n", "\ufeff"])
def test_an_empty_csv_is_refused(tmp_path: Path, text: str) -> None:
    """The error names the file and what it should hold."""
    message = refused(write(tmp_path, text))
    assert f"csv:{tmp_path / 'schedule.csv'}' is empty: give a row of actions" in message


def test_ranks_compare_the_lists_of_a_csv_and_not_its_name(tmp_path: Path) -> None:
    """Hosts may keep it elsewhere, and idle slots are nothing; another order is another hint."""
    one = Config(microbatches=2, hint=write(tmp_path, GOOD))
    same = Config(microbatches=2, hint=write(tmp_path, PLAIN, "copy.csv"))
    other_text = PLAIN.replace("1B0,1F1", "1F1,1B0")
    other = Config(microbatches=2, hint=write(tmp_path, other_text, "other.csv"))
    assert one.hint_name == same.hint_name != other.hint_name
    assert one.agreed() == same.agreed()
    mine, theirs = dict(one.agreed()), dict(other.agreed())
    assert {name for name in mine if mine[name] != theirs[name]} == {"hint"}
    assert str(tmp_path) not in one.hint_name


def test_a_csv_is_read_when_the_config_is_made(tmp_path: Path) -> None:
    """What happens to the file later changes nothing."""
    config = Config(microbatches=2, hint=write(tmp_path, PLAIN), binding=True)
    write(tmp_path, "")
    cores = Cores(config, Topology(2), seed=1)
    assert [words(row) for row in tasks_of(cores.run_step())] == ROWS


# -- torch's schedule objects ----------------------------------------------------------------------


def looped(kind: Any, microbatches: int, *, ranks: int = 2, chunks: int = 1) -> Any:
    """A torch schedule of several stages per rank, as rank 0 builds it."""
    return built(kind, Topology(ranks, chunks=chunks), microbatches)


def ordered(*rows: list[Any]) -> Any:
    """An object with a `pipeline_order` as torch has it."""
    return SimpleNamespace(pipeline_order=dict(enumerate(rows)))


def action(word: str) -> Any:
    return torch_schedules._Action.from_str(word)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 5), (4, 6), (4, 2)])
def test_torchs_gpipe_is_ours(ranks: int, microbatches: int) -> None:
    """Its schedule object is a hint, and lists what is generated here."""
    schedule = ScheduleGPipe(stage(0, ranks, ranks), microbatches)
    theirs = listed(schedule, microbatches, ranks)
    assert theirs == published("gpipe", microbatches, ranks)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 5), (4, 6), (4, 4), (8, 16)])
def test_torchs_1f1b_is_ours_on_every_rank_where_it_lists_every_task(
    ranks: int, microbatches: int
) -> None:
    """Version 2.13 lists no F0 on the last stage and is refused, with the row and the task."""
    schedule = Schedule1F1B(stage(0, ranks, ranks), microbatches)
    order = schedule.pipeline_order
    assert order is not None
    ours = published("1f1b", microbatches, ranks)
    for rank in range(ranks - 1):
        theirs = [str(each) for each in order[rank] if each is not None]
        assert [word for word in theirs if "REDUCE" not in word] == list(map(str, ours[rank]))
    assert action(f"{ranks - 1}F0") not in order[ranks - 1]
    with pytest.raises(ValueError, match=rf"^Schedule1F1B .*, row {ranks - 1}.*{ranks - 1}F"):
        Config(microbatches=microbatches, hint=schedule).check_order(Topology(ranks))


@pytest.mark.parametrize("limit", ["auto", 7])
def test_a_torch_schedule_is_executed_as_it_stands(limit: Any) -> None:
    """Interleaved 1F1B with a stage per rank fills further than 1F1B; its peak is its own."""
    schedule = looped(ScheduleInterleaved1F1B, 8, ranks=4)
    config = Config(microbatches=8, hint=schedule, binding=True, limit=limit)
    cores = Cores(config, Topology(4), seed=2)
    assert tasks_of(cores.run_step()) == listed(schedule, 8, 4)
    assert cores.peaks == [7, 5, 3, 1]


def test_a_torch_schedule_that_splits_backwards_is_executed_with_them_split() -> None:
    """Zero-bubble lists I and W, each of which is a task of its own."""
    schedule = looped(ScheduleInterleavedZeroBubble, 6, ranks=3)
    config = Config(microbatches=6, hint=schedule, binding=True)
    assert config.splits
    cores = Cores(config, Topology(3), seed=7)
    ran = cores.run_step()
    assert tasks_of(ran) == listed(schedule, 6, 3)
    assert {each.kind.value for each in tasks_of(ran)[0]} == {"F", "I", "W"}


def test_a_torch_schedule_that_reverses_the_backwards_needs_free_accumulation() -> None:
    """Breadth-first runs them last to first: it may rank, and may bind where the order is free."""
    schedule = looped(ScheduleLoopedBFS, 3)
    assert words(listed(schedule, 3)[0]) == "0F0 0F1 0F2 0B2 0B1 0B0"
    with pytest.raises(ValueError, match="row 0: 0B2 stands before 0B1") as caught:
        Config(microbatches=3, hint=schedule, binding=True).check_order(Topology(2))
    assert "ScheduleLoopedBFS" in str(caught.value)
    free = Config(microbatches=3, hint=schedule, binding=True, deterministic=False)
    assert tasks_of(Cores(free, Topology(2)).run_step()) == listed(schedule, 3)


@pytest.mark.parametrize(
    ("kind", "chunks", "fault"),
    [
        (ScheduleInterleaved1F1B, 2, "task 2F0, but rank 0 owns the stages [0]"),
        (ScheduleInterleavedZeroBubble, 2, "task 2F0, but rank 0 owns the stages [0]"),
    ],
)
def test_a_torch_schedule_for_another_pipeline_is_refused(
    kind: Any, chunks: int, fault: str
) -> None:
    """Of more stages per rank: the error names class, row, task and rule."""
    with pytest.raises(ValueError, match=f"^{kind.__name__}, row 0, entry 2: ") as caught:
        Config(microbatches=4, hint=looped(kind, 4, chunks=chunks)).check_order(Topology(2))
    assert fault in str(caught.value)


@pytest.mark.parametrize("written", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("kind", [ScheduleInterleaved1F1B, ScheduleLoopedBFS])
def test_what_torch_writes_is_read_back(tmp_path: Path, kind: Any, written: str) -> None:
    """With and without its communication: the file and the object are one hint."""
    schedule = looped(kind, 6, ranks=3)
    path = tmp_path / "torch.csv"
    schedule._dump_csv(str(path), format=written)
    assert listed(f"csv:{path}", 6, 3) == listed(schedule, 6, 3)
    names = {Config(microbatches=6, hint=hint).hint_name for hint in (schedule, f"csv:{path}")}
    assert len(names) == 1


def test_idle_slots_and_overlapped_actions_of_a_torch_schedule_are_read() -> None:
    """None is nothing; two actions in one are two tasks; what is passed in stays as it was."""
    both = torch_schedules._Action(
        -1, torch_schedules.OVERLAP_F_B, None, (action("0F1"), action("0B0"))
    )
    first = [action("0F0"), None, both, None, action("0B1")]
    schedule = ordered(first, [None, *map(action, ROWS[1].split()), None])
    assert [words(row) for row in listed(schedule)] == ROWS
    config = Config(microbatches=2, hint=schedule)
    first.clear()
    assert config.order.orders(Topology(2), 2, 0) == [tasks(row) for row in ROWS]  # type: ignore[union-attr] # a Schedule


@pytest.mark.parametrize("order", [None, {}])
def test_a_torch_schedule_without_an_order_is_refused(order: Any) -> None:
    """Forward-only ones have none: the error names the class and what to use."""
    message = refused(SimpleNamespace(pipeline_order=order))
    assert message.startswith("hint SimpleNamespace has no pipeline_order: ")
    forward_only = torch_schedules._ScheduleForwardOnly(stage(0, 2, 2), 2)
    assert "hint _ScheduleForwardOnly has no pipeline_order: use a schedule" in refused(
        forward_only
    )


def test_an_action_of_a_torch_schedule_that_is_no_task_is_refused() -> None:
    """The error names the class, the row and the cell."""
    nameless = torch_schedules._Action(0, torch_schedules.FORWARD, None)
    message = refused(ordered([None, nameless], []))
    assert message.startswith("SimpleNamespace, row 0, cell 1: task '0F' is no task: write")
    with pytest.raises(ValueError, match="is no hint order"):
        resolve_hint(ScheduleGPipe)

"""The dispatch log: its fields, and what a bad disk costs."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rrfp_async.arbiter import Decision, Reason
from rrfp_async.ids import TaskId
from rrfp_async.trace import writer
from rrfp_async.trace.records import SCHEMA, DispatchRecord
from rrfp_async.trace.rendering import text_of
from rrfp_async.trace.writer import JsonlTrace, NullTrace, open_trace
from tests.machine import took


def record(step: int = 0, *, task: str | None = "2F5") -> DispatchRecord:
    """A record of one decision."""
    chosen = None if task is None else TaskId.parse(task)
    passed_over = (TaskId.parse("2B1"), TaskId.parse("2F0"))
    decision = Decision(chosen, 3, 4, passed_over, Reason.READY_FIRST)
    return DispatchRecord(step, 2, decision, 0.25, 1.5)


def lines_of(folder: Path, rank: int = 2) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """The writer's threads end."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("rrfp-trace"):
            thread.join(1.0)
            assert not thread.is_alive()


def test_a_record_has_the_fields_of_the_schema(tmp_path: Path) -> None:
    """One JSON object a line: names, types and values as documented, tasks as words."""
    with JsonlTrace(tmp_path, 2) as trace:
        trace.write(record())
    assert lines_of(tmp_path) == [
        {
            "event": "dispatch",
            "schema": SCHEMA,
            "step": 0,
            "rank": 2,
            "stage": 2,
            "task": "2F5",
            "hint_position": 3,
            "ready": 4,
            "passed_over": ["2B1", "2F0"],
            "reason": "higher-ranked tasks were not ready or not admissible",
            "waited_s": 0.25,
            "time_s": 1.5,
        }
    ]


def test_a_decision_for_nothing_can_be_written(tmp_path: Path) -> None:
    """Without a task, task and stage are null."""
    with JsonlTrace(tmp_path, 2) as trace:
        trace.write(record(task=None))
    [line] = lines_of(tmp_path)
    assert (line["task"], line["stage"]) == (None, None)


def test_records_keep_their_order_and_close_writes_the_last(tmp_path: Path) -> None:
    """Thousands of records, all there after close, in the order they came."""
    trace = JsonlTrace(tmp_path / "new" / "folder", 2)
    for step in range(5000):
        trace.write(record(step))
    trace.close()
    assert [line["step"] for line in lines_of(tmp_path / "new" / "folder")] == list(range(5000))
    assert trace.statistics() == {"written": 5000, "pending": 0, "lost": 0}


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    """A run's log is of that run alone."""
    for step in (1, 2):
        with JsonlTrace(tmp_path, 2) as trace:
            trace.write(record(step))
    assert [line["step"] for line in lines_of(tmp_path)] == [2]


def test_closing_twice_is_harmless_and_late_records_are_lost(tmp_path: Path) -> None:
    """After close a record is counted as lost, never raised."""
    trace = JsonlTrace(tmp_path, 2)
    trace.close()
    trace.close()
    trace.write(record())
    assert trace.statistics()["lost"] == 1


def _close_twice(trace: JsonlTrace) -> None:
    trace.close()
    trace.close()


class Disk:
    """A file that takes so many bytes, and whose writes may wait to be let go.

    Attributes:
        kept: What it took.
    """

    def __init__(
        self, *, room_bytes: int = 1 << 30, hangs: bool = False, error: OSError | None = None
    ) -> None:
        self.let_go = threading.Event()
        self.reached = threading.Event()
        self.kept = b""
        self.room_bytes = room_bytes
        self._error = error or OSError(28, "No space left on device")
        if not hangs:
            self.let_go.set()

    def write(self, data: memoryview) -> int:
        self.reached.set()
        self.let_go.wait(10.0)
        taken = bytes(data[: self.room_bytes - len(self.kept)])
        if not taken:
            raise self._error
        self.kept += taken
        return len(taken)

    def truncate(self, size: int) -> None:
        self.kept = self.kept[:size]

    def seek(self, place: int) -> None:
        assert place == len(self.kept)

    def close(self) -> None:
        if not self.room_bytes:
            raise self._error


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Opens a trace on a `Disk`."""

    def open_on(disk: Disk) -> JsonlTrace:
        monkeypatch.setattr(Path, "open", lambda *_args, **_kwargs: disk)
        return JsonlTrace(tmp_path, 2)

    return open_on


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), BrokenPipeError(32, "Broken pipe")]
)
def test_a_failing_disk_never_raises_and_is_told_once(on_disk: Any, error: OSError) -> None:
    """Every record is lost and counted, one warning at close, none at the second close."""
    trace = on_disk(Disk(room_bytes=0, error=error))
    for step in range(10):
        trace.write(record(step))
    with pytest.warns(RuntimeWarning, match="the trace lost 10 records") as told:
        _close_twice(trace)
    assert len(told) == 1
    assert trace.statistics() == {"written": 0, "pending": 0, "lost": 10}


def test_a_disk_that_fills_up_keeps_whole_lines_only(on_disk: Any) -> None:
    """What fits is written, the line that does not is cut off, and the rest is counted."""
    disk = Disk(room_bytes=4 * len(text_of([record()])) + 40)
    trace = on_disk(disk)
    for step in range(10):
        trace.write(record(step))
    with pytest.warns(RuntimeWarning, match="the trace lost 6 records"):
        trace.close()
    assert trace.statistics() == {"written": 4, "pending": 0, "lost": 6}
    *lines, last = [json.loads(line) for line in disk.kept.splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert last == {"event": "lost", "records": 6}


def test_a_disk_that_has_room_again_goes_on_in_whole_lines(on_disk: Any) -> None:
    """After a full disk was emptied later records follow the last whole one, no half one."""
    disk = Disk(room_bytes=100)
    trace = on_disk(disk)
    trace.write(record(0))
    trace.flush()
    while trace.statistics()["pending"]:
        time.sleep(0.001)
    disk.room_bytes = 1 << 30
    trace.write(record(1))
    with pytest.warns(RuntimeWarning, match="lost 1 records"):
        trace.close()
    told = [json.loads(line) for line in disk.kept.splitlines()]
    assert [line.get("step") for line in told] == [1, None]


def test_what_is_flushed_is_written_without_waiting_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure's line is there though the trace, which gathers for a minute, is never closed."""
    monkeypatch.setattr(writer, "_GATHER_S", 60.0)
    trace = JsonlTrace(tmp_path, 2)
    trace.write(record())
    trace.flush()
    with took() as flushing:
        while not trace.statistics()["written"]:
            time.sleep(0.001)
    assert flushing.wall_s < 5.0
    assert len(lines_of(tmp_path)) == 1
    trace.close()


def test_records_that_come_together_are_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand records are not a thousand calls of the system."""
    disk = Disk()
    monkeypatch.setattr(Path, "open", lambda *_args, **_kwargs: disk)
    writes: list[int] = []
    write = disk.write
    monkeypatch.setattr(disk, "write", lambda data: writes.append(len(data)) or write(data))
    with JsonlTrace(tmp_path, 2) as trace:
        for step in range(1000):
            trace.write(record(step))
    assert len(disk.kept.splitlines()) == 1000
    assert len(writes) < 10


def test_a_full_buffer_loses_records_and_counts_them(
    on_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the disk hanging, records past the bound are lost at once; the caller never waits."""
    monkeypatch.setattr(writer, "_BUFFER_MOST", 5)
    disk = Disk(hangs=True)
    trace = on_disk(disk)
    trace.write(record())
    trace.flush()
    assert disk.reached.wait(2.0)
    with took() as dispatching:
        for step in range(20):
            trace.write(record(step))
    assert dispatching.own_s < 0.1
    assert trace.statistics() == {"written": 0, "pending": 6, "lost": 15}
    disk.let_go.set()
    with pytest.warns(RuntimeWarning, match="lost 15 records"):
        trace.close()
    assert trace.statistics() == {"written": 6, "pending": 0, "lost": 15}


def test_what_a_hanging_disk_never_wrote_is_counted_as_lost(
    on_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """close() gives up in time, and its warning counts the records that were not written."""
    monkeypatch.setattr(writer, "_CLOSE_TIMEOUT_S", 0.2)
    disk = Disk(hangs=True)
    trace = on_disk(disk)
    for step in range(3):
        trace.write(record(step))
    try:
        with pytest.warns(RuntimeWarning, match="lost 3 records"):
            trace.close()
    finally:
        disk.let_go.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_takes_no_record_with_it_unsaid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that cannot be rendered ends the log; close() counts what is not in it."""
    monkeypatch.setattr(writer, "text_of", lambda _records: 1 // 0)
    trace = JsonlTrace(tmp_path, 2)
    for step in range(3):
        trace.write(record(step))
    with pytest.warns(RuntimeWarning, match="lost 3 records"):
        trace.close()


def test_closing_on_a_hanging_disk_keeps_to_its_timeout(
    on_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """close() waits its timeout, and counts what is in the buffer and in the thread's hands."""
    monkeypatch.setattr(writer, "_CLOSE_TIMEOUT_S", 0.4)
    disk = Disk(hangs=True)
    trace = on_disk(disk)
    trace.write(record())
    trace.flush()
    assert disk.reached.wait(2.0)
    trace.write(record())
    with took() as closing, pytest.warns(RuntimeWarning, match="lost 2 records"):
        trace.close()
    disk.let_go.set()
    assert closing.own_s < 0.6


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path: Path) -> None:
    """Opening is the one place where the disk's fault is raised."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        JsonlTrace(tmp_path / "file", 0)


def test_no_folder_is_no_trace(tmp_path: Path) -> None:
    """None keeps nothing; a path writes one file per rank."""
    with open_trace(None, 0) as trace:
        assert isinstance(trace, NullTrace)
        trace.write(record())
        trace.close()
    with open_trace(tmp_path, 7) as trace:
        trace.write(record())
    assert len(lines_of(tmp_path, 7)) == 1


def test_two_traces_of_one_file_are_refused(tmp_path: Path) -> None:
    """A second Runtime with the same folder and rank would write over the first one's log."""
    with JsonlTrace(tmp_path, 0), pytest.raises(ValueError, match=r"rank0.jsonl.*of its own"):
        JsonlTrace(tmp_path, 0)
    JsonlTrace(tmp_path, 0).close()

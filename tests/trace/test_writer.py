"""The dispatch log: its fields, and what a bad disk costs."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rrfp_async.arbiter import Decision, Reason
from rrfp_async.ids import TaskId
from rrfp_async.trace import writer
from rrfp_async.trace.records import SCHEMA, DispatchRecord
from rrfp_async.trace.writer import JsonlTrace, NullTrace, open_trace
from tests.machine import took


def record(step: int = 0, *, task: str | None = "2F5") -> DispatchRecord:
    """A record of one decision."""
    chosen = None if task is None else TaskId.parse(task)
    passed_over = (TaskId.parse("2B1"), TaskId.parse("2F0"))
    return DispatchRecord(step, 2, Decision(chosen, 3, 4, passed_over, Reason.READY_FIRST), 0.25)


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
    """A file whose writes fail, or wait to be let go."""

    def __init__(self, *, fails: bool = False, hangs: bool = False) -> None:
        self.let_go = threading.Event()
        self.reached = threading.Event()
        self._fails = fails
        if not hangs:
            self.let_go.set()

    def write(self, _text: str) -> int:
        self.reached.set()
        self.let_go.wait(10.0)
        if self._fails:
            raise OSError(28, "No space left on device")
        return 0

    def flush(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        if self._fails:
            raise OSError(28, "No space left on device")


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Opens a trace on a `Disk`."""

    def open_on(disk: Disk) -> JsonlTrace:
        monkeypatch.setattr(Path, "open", lambda *_args, **_kwargs: disk)
        return JsonlTrace(tmp_path, 2)

    return open_on


def test_a_failing_disk_never_raises_and_is_told_once(on_disk: Any) -> None:
    """Every record is lost and counted, one warning at close, none at the second close."""
    trace = on_disk(Disk(fails=True))
    for step in range(10):
        trace.write(record(step))
    with pytest.warns(RuntimeWarning, match=r"the trace lost \d+ records") as told:
        _close_twice(trace)
    assert len(told) == 1
    assert trace.statistics()["written"] == 0
    assert trace.statistics()["lost"] >= 10


def test_a_full_queue_loses_records_and_counts_them(
    on_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the disk hanging, records past the bound are lost at once; the caller never waits."""
    monkeypatch.setattr(writer, "_QUEUE_MOST", 5)
    disk = Disk(hangs=True)
    trace = on_disk(disk)
    trace.write(record())
    assert disk.reached.wait(2.0)
    with took() as dispatching:
        for step in range(20):
            trace.write(record(step))
    assert dispatching.own_s < 0.1
    assert trace.statistics() == {"written": 0, "pending": 5, "lost": 15}
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


def test_closing_on_a_hanging_disk_keeps_to_its_timeout(
    on_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With queue full and disk hanging, close() waits once its timeout, not twice."""
    monkeypatch.setattr(writer, "_QUEUE_MOST", 1)
    monkeypatch.setattr(writer, "_CLOSE_TIMEOUT_S", 0.4)
    disk = Disk(hangs=True)
    trace = on_disk(disk)
    trace.write(record())
    assert disk.reached.wait(2.0)
    trace.write(record())
    trace.write(record())  # lost, so that close() warns
    with took() as closing, pytest.warns(RuntimeWarning, match="lost"):
        trace.close()
    disk.let_go.set()
    trace._queue.put(None, timeout=2.0)  # close() could not
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

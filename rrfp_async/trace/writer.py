"""Where records go: nowhere, or to one JSON-lines file per rank, off the hot path.

The caller only appends to a bounded buffer; a thread of the writer gathers what comes within a
moment, renders it and writes it in one piece. A disk that fails or cannot keep up never
stops training: records are lost, counted, warned of once and told in the file's last line. What is
lost is lost in whole lines, as far as the file lets itself be cut. The writer does not know what
the records mean.
"""

import io
import sys
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from rrfp_async.trace.records import LostRecord, Record
from rrfp_async.trace.rendering import text_of

if sys.platform != "win32":
    import fcntl

_BUFFER_MOST = 100_000
_GATHER_S = 0.25
_AT_ONCE_MOST = 4_096
_HELD_MOST = 64  # records that are rendered without letting go of the interpreter
_CLOSE_TIMEOUT_S = 10.0


class Trace(ABC):
    """A sink for the records of one rank. A context manager; closing twice is harmless."""

    @abstractmethod
    def write(self, record: Record) -> None:
        """Take a record. Never blocks, never raises."""

    def flush(self) -> None:  # noqa: B027 - nothing waits
        """Have what is pending written now, not soon. Does not wait for it."""

    def statistics(self) -> dict[str, int]:
        """Counts of records written, pending and lost."""
        return {"written": 0, "pending": 0, "lost": 0}

    @abstractmethod
    def close(self) -> None:
        """Write what is pending, within a bounded time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class NullTrace(Trace):
    """Keeps nothing."""

    def write(self, record: Record) -> None:
        """Ignore the record."""

    def close(self) -> None:
        """Nothing to do."""


class JsonlTrace(Trace):
    """Writes `folder/rank{rank}.jsonl`, replacing an older file; one JSON object a line.

    All but its thread's own methods belong to one thread.

    Raises:
        OSError: If the file cannot be opened. Later faults of the disk only lose records.
        ValueError: If another trace is writing it.
    """

    def __init__(self, folder: str | Path, rank: int) -> None:
        path = Path(folder) / f"rank{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._claimed = _claim(path)
        try:
            self._file: io.RawIOBase = path.open("wb", buffering=0)
        except BaseException:
            self._claimed.close()
            raise
        self._buffer: deque[Record] = deque()
        self._taken = self._refused = 0  # counted by the caller
        self._written = self._failed = 0  # counted by the thread
        self._good_bytes = 0
        self._closed = False
        self._some = threading.Event()
        self._now = threading.Event()
        self._called = False
        self._thread = threading.Thread(target=self._write_all, name=f"rrfp-trace-{rank}")
        self._thread.daemon = True  # an exit without close() must not hang
        self._thread.start()

    def write(self, record: Record) -> None:
        """Take the record; counts it as lost when the buffer is full or closed."""
        if self._closed or len(self._buffer) >= _BUFFER_MOST:
            self._refused += 1
            return
        self._taken += 1
        self._buffer.append(record)
        if not self._called:  # once for all that comes while the thread gathers
            self._called = True
            self._some.set()

    def flush(self) -> None:
        """Wake the thread."""
        self._now.set()
        self._some.set()

    def close(self) -> None:
        """Write and close the file; waits at most ten seconds for the disk."""
        if self._closed:
            return
        self._closed = True
        self.flush()
        self._thread.join(_CLOSE_TIMEOUT_S)
        # What is left will not be written: the thread has died, or the disk hangs and it stays.
        self._refused += self._taken - self._written - self._failed
        self._taken = self._written + self._failed
        if lost := self.statistics()["lost"]:
            warnings.warn(f"the trace lost {lost} records", RuntimeWarning, stacklevel=2)

    def statistics(self) -> dict[str, int]:
        """Counts of records written, pending and lost."""
        pending = max(0, self._taken - self._written - self._failed)
        return {
            "written": self._written,
            "pending": pending,
            "lost": self._refused + self._failed,
        }

    # -- on the thread ---------------------------------------------------------------------------

    def _write_all(self) -> None:
        try:
            while not self._closed:
                self._some.wait()
                self._now.wait(_GATHER_S)
                self._now.clear()
                self._some.clear()
                self._called = False  # from here on the caller calls again
                self._drain()
            self._drain()
            with suppress(OSError, ValueError):
                self._tell_lost()
        finally:
            with suppress(OSError):
                self._file.close()
            self._claimed.close()

    def _drain(self) -> None:
        while self._buffer:
            texts: list[str] = []
            count = 0
            while self._buffer and count < _AT_ONCE_MOST:
                records = [
                    self._buffer.popleft() for _ in range(min(_HELD_MOST, len(self._buffer)))
                ]
                texts.append(text_of(records))
                count += len(records)
                time.sleep(0)  # lets go of the interpreter: the event loop waits for no batch
            whole = self._write_lines("".join(texts).encode())
            self._written += whole
            self._failed += count - whole

    def _write_lines(self, data: bytes) -> int:
        """Write the lines; returns how many came out whole, and cuts off the one that did not."""
        done = 0
        try:
            while done < len(data):
                done += self._file.write(memoryview(data)[done:]) or 0
        except (OSError, ValueError):  # disk full, pipe closed, or the file was closed under us
            done = data.rfind(b"\n", 0, done) + 1
            with suppress(OSError, ValueError):
                self._file.truncate(self._good_bytes + done)
                self._file.seek(self._good_bytes + done)
        self._good_bytes += done
        return data.count(b"\n", 0, done)

    def _tell_lost(self) -> None:
        if lost := self._refused + self._failed:
            self._write_lines(text_of([LostRecord(lost)]).encode())


def _claim(path: Path) -> io.FileIO:
    """Hold the file for one trace; the claim ends when the returned file is closed."""
    claimed = io.FileIO(path, "a")
    if sys.platform != "win32":  # there, two traces on one file are the user's affair
        try:
            fcntl.flock(claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            claimed.close()
            raise ValueError(
                f"{path} is being written by another Runtime: give each a trace_dir of its own"
            ) from error
    return claimed


def open_trace(folder: str | Path | None, rank: int) -> Trace:
    """The trace of `rank` in `folder`, or one that keeps nothing for None."""
    return NullTrace() if folder is None else JsonlTrace(folder, rank)

"""Where records go: nowhere, or to one JSON-lines file per rank, off the hot path.

The caller only appends to a bounded queue; a thread of the writer renders (structlog) and writes.
A disk that fails or cannot keep up never stops training: records are lost, counted, and warned
of once. The writer does not know what the records mean.
"""

import io
import queue
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

import structlog

from rrfp_async.trace.records import Record

if sys.platform != "win32":
    import fcntl

_QUEUE_MOST = 100_000
_CLOSE_TIMEOUT_S = 10.0


class Trace(ABC):
    """A sink for the records of one rank. A context manager; closing twice is harmless."""

    @abstractmethod
    def write(self, record: Record) -> None:
        """Take a record. Never blocks, never raises."""

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

    Raises:
        OSError: If the file cannot be opened. Later faults of the disk only lose records.
        ValueError: If another trace is writing it.
    """

    def __init__(self, folder: str | Path, rank: int) -> None:
        path = Path(folder) / f"rank{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._claimed = _claim(path)
        try:
            self._file: TextIO = path.open("w", encoding="utf-8")
        except BaseException:
            self._claimed.close()
            raise
        self._queue: queue.Queue[Record | None] = queue.Queue(_QUEUE_MOST)
        self._lost = 0
        self._written = 0
        self._closed = False
        self._thread = threading.Thread(target=self._write_all, name=f"rrfp-trace-{rank}")
        self._thread.daemon = True  # an exit without close() must not hang
        self._thread.start()

    def write(self, record: Record) -> None:
        """Queue the record; counts it as lost when the queue is full or closed."""
        if self._closed:
            self._lost += 1
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Flush and close the file; waits at most ten seconds for the disk."""
        if self._closed:
            return
        self._closed = True
        with suppress(queue.Full):  # then the thread finds `_closed` once the queue is empty
            self._queue.put_nowait(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():  # the disk hangs: the thread is a daemon and stays behind
            self._lost += self._queue.qsize()
        if self._lost:
            warnings.warn(f"the trace lost {self._lost} records", RuntimeWarning, stacklevel=2)

    def statistics(self) -> dict[str, int]:
        """Counts of records written, pending and lost."""
        return {"written": self._written, "pending": self._queue.qsize(), "lost": self._lost}

    def _next_record(self) -> Record | None:
        """The next record, or None after the last."""
        if self._closed and self._queue.empty():
            return None
        return self._queue.get()

    def _write_all(self) -> None:
        logger = structlog.wrap_logger(
            structlog.WriteLogger(self._file),
            processors=[structlog.processors.JSONRenderer()],
            wrapper_class=structlog.BoundLogger,
        )
        while (record := self._next_record()) is not None:
            try:
                logger.msg(record.EVENT, **record.fields())
                self._written += 1
            except (OSError, ValueError):  # the disk is full, or the file was closed under us
                self._lost += 1
        try:
            self._file.close()
        except OSError:
            self._lost += 1
        self._claimed.close()


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

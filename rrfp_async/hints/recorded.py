"""Schedules that somebody else wrote down: a CSV file or object of torch, or an earlier run's log.

torch.distributed.pipelining's format has a row per rank and an action per cell, such as `2F5`;
empty cells are idle slots. Its communication actions are left out: transfers follow readiness here.
"""

import csv
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rrfp_async.hints.checks import split_stages
from rrfp_async.hints.schedule import Schedule
from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.topology import Topology

_COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_LOG = re.compile(r"rank\d+\.jsonl")
_LOG_SCHEMAS = (1, 2)
"""The versions of the records that can be replayed; trace/records.py writes the last."""
_TASK_EVENTS = ("dispatch", "void")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")

Orders = Sequence[Sequence[TaskId]]


class TableSchedule(Schedule):
    """One list per rank, for one number of microbatches.

    Args:
        source: Where it was read, for messages.
        orders: The lists.
    """

    def __init__(self, source: str, orders: Orders) -> None:
        super().__init__()
        self._source = source
        self._orders = orders
        self.splits = bool(split_stages(orders))
        self._name = f"csv of sha256 {_digest([orders])}"

    @property
    def name(self) -> str:
        """A digest of the lists: hosts may keep the file in different places."""
        return self._name

    def row(self, rank: int) -> str:
        """The file and row."""
        return f"{self._source}, row {rank}"

    def orders(self, topology: Topology, microbatches: int, step: int) -> Orders:  # noqa: ARG002
        """The lists as read."""
        return self._orders


def read_csv(path: str | Path) -> TableSchedule:
    """The schedule in a CSV file that torch.distributed.pipelining wrote or could read.

    Raises:
        ValueError: If the file cannot be read, or a cell is no action; names row and cell.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"hint 'csv:{path}' cannot be read ({error}): name a CSV file") from error
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise ValueError(f"hint 'csv:{path}' is empty: give a row of actions for each rank")
    return TableSchedule(str(path), _parsed(str(path), rows))


def is_torch_schedule(hint: Any) -> bool:
    """Whether `hint` looks like a schedule object of torch.distributed.pipelining."""
    return hasattr(hint, "pipeline_order")


def from_torch(schedule: Any) -> TableSchedule:
    """The `pipeline_order` of a schedule object of torch.distributed.pipelining.

    Raises:
        ValueError: If it has none, or an action that is not known here.
    """
    kind = type(schedule).__name__
    if kind == "Schedule1F1B":
        kind += " (torch's own list lacks the last stage's first forward: use hint='1f1b')"
    order = schedule.pipeline_order
    if not order:
        raise ValueError(f"hint {kind} has no pipeline_order: use a schedule that lists its order")
    rows = [["" if a is None else str(a) for a in order[rank]] for rank in sorted(order)]
    return TableSchedule(kind, _parsed(kind, rows))


class ReplayedSchedule(Schedule):
    """The tasks that an earlier run dispatched, step by step; executed as they stand by default.

    Steps after the recorded ones repeat the last recorded one of their mode.
    """

    binds = True
    complete = False

    def __init__(self, folder: Path, steps: Sequence[Orders]) -> None:
        super().__init__()
        self._folder = folder
        self._steps = steps
        self.splits = any(split_stages(orders) for orders in steps)
        self._trains = [
            any(task.kind is not TaskKind.F for order in orders for task in order)
            for orders in steps
        ]
        self._name = f"replay of sha256 {_digest(steps)}"

    @property
    def name(self) -> str:
        """A digest of the recorded lists."""
        return self._name

    def check_not_overwritten(self, trace_dir: Path) -> None:
        """Refuse to log where the replayed log lies.

        Raises:
            ValueError: If `trace_dir` is its folder.
        """
        if trace_dir.resolve() == self._folder.resolve():
            raise ValueError(
                f"trace_dir={str(trace_dir)!r} holds the log that hint 'replay:{self._folder}' "
                f"replays: write the new log into another folder"
            )

    def row(self, rank: int) -> str:
        """The log file."""
        return str(self._folder / f"rank{rank}.jsonl")

    def orders(self, topology: Topology, microbatches: int, step: int) -> Orders:  # noqa: ARG002
        """The lists of the step as recorded."""
        return self._steps[step]

    def step_for(self, step: int, *, training: bool) -> int:
        """The recorded step; after the last, the last one of that mode."""
        if step < len(self._steps):
            return step
        same = [number for number, trains in enumerate(self._trains) if trains is training]
        return same[-1] if same else len(self._steps) - 1

    def known_steps(self, microbatches: int) -> Iterable[tuple[int, int, bool]]:  # noqa: ARG002
        """Every recorded step, with as many microbatches as it had."""
        for step, orders in enumerate(self._steps):
            count = 1 + max(task.microbatch for order in orders for task in order)
            yield step, count, self._trains[step]


def read_log(folder: str | Path) -> ReplayedSchedule:
    """The dispatches that the ranks of an earlier run logged in `folder` (its `trace_dir`).

    Raises:
        ValueError: If the folder holds no logs, one is missing or cannot be read, or a line has
            no task.
    """
    folder = Path(folder)
    try:
        count = sum(_LOG.fullmatch(path.name) is not None for path in folder.iterdir())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"hint 'replay:{folder}' cannot be read ({error}): name the trace_dir of an earlier run"
        ) from error
    if not count:
        raise ValueError(
            f"hint 'replay:{folder}': there is no rank*.jsonl: name the trace_dir of an earlier run"
        )
    by_step: defaultdict[int, list[list[TaskId]]] = defaultdict(lambda: [[] for _ in range(count)])
    for rank in range(count):
        for step, task in _dispatches(folder / f"rank{rank}.jsonl"):
            by_step[step][rank].append(task)
    if sorted(by_step) != list(range(len(by_step))):
        raise ValueError(
            f"hint 'replay:{folder}': the logs hold the steps {sorted(by_step)}: replay a run that "
            f"logged every step from 0"
        )
    if not by_step:
        raise ValueError(f"hint 'replay:{folder}': no dispatch is logged: replay a run with steps")
    return ReplayedSchedule(folder, [by_step[step] for step in sorted(by_step)])


def _dispatches(path: Path) -> Iterable[tuple[int, TaskId]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"hint 'replay:{path.parent}': {path.name} cannot be read ({error}): bring the log of "
            f"every rank into one folder"
        ) from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if record["event"] not in _TASK_EVENTS or record["task"] is None:
                continue
            known = record["schema"] in _LOG_SCHEMAS
            step, task = int(record["step"]), TaskId.parse(record["task"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number} is no record of a dispatch ({error!r}): replay a whole log"
            ) from error
        if not known:
            raise ValueError(
                f"{path}, line {number} has schema {record['schema']!r}, only {_LOG_SCHEMAS} can "
                f"be replayed: record the run again with this release"
            )
        if task.kind is not TaskKind.R:  # it runs beside the list
            yield step, task


def _parsed(source: str, rows: Sequence[Sequence[str]]) -> Orders:
    return [
        [
            task
            for cell, word in enumerate(row)
            for task in _tasks_of(word.strip(), f"{source}, row {rank}, cell {cell}")
        ]
        for rank, row in enumerate(rows)
    ]


def _tasks_of(word: str, where: str) -> list[TaskId]:
    """The tasks of one action: none for idling and communication, two if overlapped."""
    if not word or _COMMUNICATION.fullmatch(word):
        return []
    if overlapped := _OVERLAP.fullmatch(word):
        parts = overlapped.group(1).split(";")
        return [task for part in parts for task in _tasks_of(part.strip(), where)]
    try:
        return [TaskId.parse(word)]
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _digest(steps: Sequence[Orders]) -> str:
    words = "\n".join(" ".join(map(str, order)) for orders in steps for order in orders)
    return hashlib.sha256(words.encode()).hexdigest()[:16]

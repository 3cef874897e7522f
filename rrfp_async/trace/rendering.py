"""Records as lines of JSON.

What every task makes (dispatch, task, transfers) is filled into a line that stands here, many lines
at once, a fifth of what a dict for each costs: with a log on, that is most of what a task costs.
Their times are a clock's, and so finite. Other records are rare.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from rrfp_async.arbiter import PASSED_OVER_MOST
from rrfp_async.trace.records import (
    SCHEMA,
    DispatchRecord,
    Record,
    TaskRecord,
    TransferRecord,
)

_TASK = '{"event": "task", "step": %d, "task": "%s", "start_s": %.9f, "end_s": %.9f}\n'
_TRANSFER = (
    '{"event": "transfer", "step": %d, "task": "%s", "edge": [%d, %d], "direction": "%s", '
    '"peer": %d, "bytes": %d, "packed": %s, "start_s": %.9f, "end_s": %.9f}\n'
)
_DISPATCH = tuple(  # by how many were passed over
    f'{{"event": "dispatch", "schema": {SCHEMA}, "step": %d, "rank": %d, "stage": %d, '
    f'"task": "%s", "hint_position": %s, "ready": %d, "passed_over": [{passed_over}], '
    '"reason": "%s", "waited_s": %.9f, "time_s": %.9f}\n'
    for passed_over in (", ".join(['"%s"'] * count) for count in range(PASSED_OVER_MOST + 1))
)


Filled = tuple[str, tuple[object, ...]]
"""A line with its end, and what is to be filled in."""


def text_of(records: Iterable[Record]) -> str:
    """The records as lines of JSON."""
    lines: list[str] = []
    values: list[object] = []
    for record in records:
        line, filled_in = _FILLED.get(type(record), _any)(record)
        lines.append(line)
        values += filled_in
    return "".join(lines) % tuple(values)


def _any(record: Record) -> Filled:
    return "%s\n", (json.dumps({"event": record.EVENT, **record.fields()}),)


def _task(record: TaskRecord) -> Filled:
    return _TASK, (record.step, record.task, record.start_s, record.end_s)


def _transfer(record: TransferRecord) -> Filled:
    return _TRANSFER, (
        record.step,
        record.task,
        record.edge.source,
        record.edge.target,
        record.direction.value,
        record.peer,
        record.bytes,
        "true" if record.packed else "false",
        record.start_s,
        record.end_s,
    )


def _dispatch(record: DispatchRecord) -> Filled:
    decision = record.decision
    task = decision.task
    if task is None or len(decision.passed_over) >= len(_DISPATCH):
        return _any(record)
    return _DISPATCH[len(decision.passed_over)], (
        record.step,
        record.rank,
        task.stage,
        task,
        "null" if decision.hint_position is None else decision.hint_position,
        decision.ready,
        *decision.passed_over,
        decision.reason.value,
        record.waited_s,
        record.time_s,
    )


_FILLED: Mapping[type[Record], Callable[[Any], Filled]] = MappingProxyType(
    {TaskRecord: _task, TransferRecord: _transfer, DispatchRecord: _dispatch}
)

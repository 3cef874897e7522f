"""Records as lines of JSON.

What every task makes (dispatch, task, transfers) is written out by hand, three times as fast as by
way of a dict: with a log on, that is most of what a task costs. Other records are rare.
"""

import json
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from rrfp_async.trace.records import (
    SCHEMA,
    DispatchRecord,
    Record,
    TaskRecord,
    TransferRecord,
    in_json,
)


def line_of(record: Record) -> str:
    """The record as one line of JSON, without its end."""
    write = _WRITERS.get(type(record))
    return any_line_of(record) if write is None else write(record)


def any_line_of(record: Record) -> str:
    """The same for a record of any kind, from its fields."""
    return json.dumps({"event": record.EVENT, **record.fields()})


def _task(record: TaskRecord) -> str:
    return (
        f'{{"event": "task", "step": {record.step}, "task": "{record.task}", '
        f'"start_s": {_s(record.start_s)}, "end_s": {_s(record.end_s)}}}'
    )


def _transfer(record: TransferRecord) -> str:
    edge = record.edge
    return (
        f'{{"event": "transfer", "step": {record.step}, "task": "{record.task}", '
        f'"edge": [{edge.source}, {edge.target}], "direction": "{record.direction.value}", '
        f'"peer": {record.peer}, "bytes": {record.bytes}, '
        f'"packed": {"true" if record.packed else "false"}, '
        f'"start_s": {_s(record.start_s)}, "end_s": {_s(record.end_s)}}}'
    )


def _dispatch(record: DispatchRecord) -> str:
    decision = record.decision
    task = decision.task
    if task is None:
        return any_line_of(record)
    position = "null" if decision.hint_position is None else decision.hint_position
    passed_over = ", ".join([f'"{other}"' for other in decision.passed_over])
    return (
        f'{{"event": "dispatch", "schema": {SCHEMA}, "step": {record.step}, '
        f'"rank": {record.rank}, "stage": {task.stage}, "task": "{task}", '
        f'"hint_position": {position}, "ready": {decision.ready}, '
        f'"passed_over": [{passed_over}], "reason": "{decision.reason.value}", '
        f'"waited_s": {_s(record.waited_s)}, "time_s": {_s(record.time_s)}}}'
    )


def _s(value: float) -> str:
    """Seconds to the nanosecond, as JSON writes them."""
    return repr(round(value, 9)) if math.isfinite(value) else f'"{in_json(value)}"'


_WRITERS: Mapping[type[Record], Callable[[Any], str]] = MappingProxyType(
    {TaskRecord: _task, TransferRecord: _transfer, DispatchRecord: _dispatch}
)

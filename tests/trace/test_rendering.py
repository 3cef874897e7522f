"""Lines written out by hand are those that the records' fields make, character by character."""

import json
import math
from itertools import product

import pytest

from rrfp_async.arbiter import Decision, Reason
from rrfp_async.ids import Edge, TaskId
from rrfp_async.trace.records import (
    Direction,
    DispatchRecord,
    Record,
    TaskRecord,
    TransferRecord,
    VoidRecord,
)
from rrfp_async.trace.rendering import any_line_of, line_of

TASKS = [TaskId.parse(word) for word in ("0F0", "12B345", "7W1")]
TIMES = [0.0, 1e-10, 0.1 + 0.2, 42795.686388915, 1e22, -0.5, math.inf, -math.inf, math.nan]
RECORDS: list[Record] = [
    *(TaskRecord(3, TASKS[1], start_s, end_s) for start_s, end_s in product(TIMES, TIMES[:2])),
    *(
        TransferRecord(0, task, Edge(1, 12), direction, 9, size, packed, time_s, 1.5)
        for task, direction, size, packed, time_s in product(
            TASKS[:1], Direction, (0, 2**40), (True, False), TIMES
        )
    ),
    *(
        DispatchRecord(1, 2, Decision(task, position, 3, tuple(passed), reason), time_s, 7.25)
        for task, position, passed, reason, time_s in product(
            (None, TASKS[2]), (None, 4), (TASKS, []), Reason, TIMES[:4]
        )
    ),
    VoidRecord(1, 2, TASKS[1]),
]


def test_every_line_is_what_its_fields_make() -> None:
    """Times that are no finite numbers included, and records that are not written by hand."""
    for record in RECORDS:
        assert line_of(record) == any_line_of(record)
        json.loads(line_of(record), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@pytest.mark.parametrize("reason", Reason)
def test_no_reason_needs_to_be_escaped(reason: Reason) -> None:
    """It stands in the line as it is."""
    assert json.dumps(reason.value) == f'"{reason.value}"'

"""Lines that are filled in say what the records' fields say, many at once or one by one."""

import json
from itertools import product

import pytest

from rrfp_async.arbiter import PASSED_OVER_MOST, Decision, Reason
from rrfp_async.ids import Edge, TaskId
from rrfp_async.trace.records import (
    Direction,
    DispatchRecord,
    LostRecord,
    Record,
    TaskRecord,
    TransferRecord,
    VoidRecord,
)
from rrfp_async.trace.rendering import text_of

TASKS = [TaskId.parse(word) for word in ("0F0", "12B345", "7W1")]
TIMES = [0.0, 1e-10, 0.1 + 0.2, 42795.686388915, 1e22, -0.5]
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
            (None, TASKS[2]),
            (None, 4),
            (TASKS, [], TASKS[:1] * PASSED_OVER_MOST, TASKS[:1] * (PASSED_OVER_MOST + 1)),
            Reason,
            TIMES[:4],
        )
    ),
    VoidRecord(1, 2, TASKS[1]),
    LostRecord(3),
]


def fields_of(record: Record) -> dict[str, object]:
    """What the record's line says, in order."""
    return {"event": record.EVENT, **record.fields()}


def test_every_line_says_what_its_fields_say() -> None:
    """Names, order and values, also of records that are not filled in."""
    for record in RECORDS:
        [line] = text_of([record]).splitlines()
        said = json.loads(line)
        assert said == fields_of(record)
        assert list(said) == list(fields_of(record))


def test_many_records_are_the_lines_of_each_in_their_order() -> None:
    """A batch is filled in at once."""
    assert text_of(RECORDS) == "".join(text_of([record]) for record in RECORDS)
    assert text_of([]) == ""


def test_a_percent_sign_in_a_record_stands_as_it_is() -> None:
    """Lines are filled in, their values are not."""

    class Told(LostRecord):
        def fields(self) -> dict[str, object]:
            return {"cause": "100 %s"}

    assert json.loads(text_of([Told(1)])) == {"event": "lost", "cause": "100 %s"}


@pytest.mark.parametrize("reason", Reason)
def test_no_reason_needs_to_be_escaped(reason: Reason) -> None:
    """It stands in the line as it is."""
    assert json.dumps(reason.value) == f'"{reason.value}"'

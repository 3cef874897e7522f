"""Every kind of record as the fields of its line."""

import json
import math
from typing import Any

import pytest

from rrfp_async.arbiter import Decision, Reason
from rrfp_async.ids import Edge, TaskId
from rrfp_async.trace.records import (
    AgreementRecord,
    Cause,
    Direction,
    DispatchRecord,
    FailureRecord,
    IdleRecord,
    Lack,
    LostRecord,
    Record,
    RunRecord,
    StepBeginRecord,
    StepEndRecord,
    TaskRecord,
    TransferRecord,
    VoidRecord,
    Wait,
)

F7 = TaskId.parse("1F7")
WAITS = (
    Wait(TaskId.parse("1B0"), Lack.GRADIENT, Edge(1, 2), TaskId.parse("2B0"), 2),
    Wait(TaskId.parse("1B1"), Lack.TASK, None, TaskId.parse("1F1"), 1),
)
LINES: dict[str, tuple[Record, dict[str, Any]]] = {
    "run": (
        RunRecord(
            *(2, 1, 2, 1, 1, 2, (0, 1), (1,), (Edge(0, 1),), "bf", "auto", 8),
            *("here", 7, -0.25, None, True, "0.1.0"),
        ),
        {
            "schema": 2,
            "rank": 1,
            "pp": 2,
            "dp": 1,
            "tp": 1,
            "stages": 2,
            "owners": [0, 1],
            "owned": [1],
            "edges": [[0, 1]],
            "hint": "bf",
            "limit": "auto",
            "microbatches": 8,
            "host": "here",
            "pid": 7,
            "clock_offset_s": -0.25,
            "clock_error_s": None,
            "simulated": True,
            "version": "0.1.0",
        },
    ),
    "step_begin": (
        StepBeginRecord(3, 1.5, True, False, (2, 1)),
        {"step": 3, "time_s": 1.5, "training": True, "update": False, "sizes": [2, 1]},
    ),
    "step_end": (
        StepEndRecord(3, 9.0, 7.5, 4.0, 2.0, 1.0, 0.5, math.inf, 2),
        {
            "step": 3,
            "time_s": 9.0,
            "step_s": 7.5,
            "compute_s": 4.0,
            "blocking_s": 2.0,
            "coordination_s": 1.0,
            "other_s": 0.5,
            "loss": "Infinity",
            "peak_in_flight": 2,
        },
    ),
    "dispatch": (
        DispatchRecord(0, 1, Decision(F7, None, 3, (F7,), Reason.READY_FIRST), 0.25, 1.5),
        {
            "schema": 2,
            "step": 0,
            "rank": 1,
            "stage": 1,
            "task": "1F7",
            "hint_position": None,
            "ready": 3,
            "passed_over": ["1F7"],
            "reason": "higher-ranked tasks were not ready or not admissible",
            "waited_s": 0.25,
            "time_s": 1.5,
        },
    ),
    "task": (
        TaskRecord(0, F7, 1.0, 1.1000000004),
        {"step": 0, "task": "1F7", "start_s": 1.0, "end_s": 1.1},
    ),
    "transfer": (
        TransferRecord(0, F7, Edge(1, 2), Direction.SEND, 2, 4096, False, 1.0, 2.0),
        {
            "step": 0,
            "task": "1F7",
            "edge": [1, 2],
            "direction": "send",
            "peer": 2,
            "bytes": 4096,
            "packed": False,
            "start_s": 1.0,
            "end_s": 2.0,
        },
    ),
    "idle": (
        IdleRecord(0, 1.0, 2.0, Cause.LIMIT, (F7,), 4, 4, WAITS),
        {
            "step": 0,
            "start_s": 1.0,
            "end_s": 2.0,
            "cause": "limit",
            "ready": ["1F7"],
            "in_flight": 4,
            "bound": 4,
            "waits": [
                {"task": "1B0", "for": "gradient", "edge": [1, 2], "of": "2B0", "rank": 2},
                {"task": "1B1", "for": "task", "edge": None, "of": "1F1", "rank": 1},
            ],
        },
    ),
    "void": (
        VoidRecord(0, 1, TaskId.parse("1B3")),
        {"schema": 2, "step": 0, "rank": 1, "stage": 1, "task": "1B3"},
    ),
    "tp": (
        AgreementRecord(0, 12, F7, 0, 0.001, 2),
        {"step": 0, "number": 12, "task": "1F7", "leader": 0, "wait_s": 0.001, "retries": 2},
    ),
    "failure": (
        FailureRecord(2, 5.0, 1, 1, "1F7", 7, "ValueError: no", "nothing ready"),
        {
            "step": 2,
            "time_s": 5.0,
            "rank": 1,
            "stage": 1,
            "task": "1F7",
            "microbatch": 7,
            "cause": "ValueError: no",
            "report": "nothing ready",
        },
    ),
    "lost": (LostRecord(3), {"records": 3}),
}


@pytest.mark.parametrize("event", LINES)
def test_a_record_is_the_fields_of_the_schema_as_json(event: str) -> None:
    """Names, order and values; tasks are words, edges pairs, seconds to the nanosecond."""
    record, fields = LINES[event]
    assert event == record.EVENT
    assert json.loads(json.dumps(record.fields(), allow_nan=False)) == fields
    assert list(record.fields()) == list(fields)


@pytest.mark.parametrize(("loss", "word"), [(math.nan, "NaN"), (-math.inf, "-Infinity")])
def test_a_loss_that_is_no_number_is_a_word(loss: float, word: str) -> None:
    """Strict readers of JSON take the line, and float() takes the word."""
    record = StepEndRecord(3, 9.0, 7.5, 4.0, 2.0, 1.0, 0.5, loss, 2)
    assert record.fields()["loss"] == word
    assert repr(float(word)) == repr(loss)

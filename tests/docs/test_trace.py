"""docs/trace.md shows a line of every event, with the fields that are written."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rrfp_async.trace import records
from rrfp_async.trace.records import Cause, Record
from tests.trace.test_records import LINES

TEXT = (Path(__file__).parents[2] / "docs" / "trace.md").read_text(encoding="utf-8")
SHOWN: dict[str, dict[str, Any]] = {
    line["event"]: line for line in map(json.loads, re.findall(r"^\{.*\}$", TEXT, re.MULTILINE))
}
KINDS = {kind.EVENT: kind for kind in Record.__subclasses__() if dataclasses.is_dataclass(kind)}


def test_every_kind_of_record_is_shown_and_nothing_else() -> None:
    """A kind that is added must be documented."""
    assert set(SHOWN) == set(KINDS) == set(LINES)


@pytest.mark.parametrize("event", SHOWN)
def test_the_line_has_the_fields_that_are_written(event: str) -> None:
    """In that order, of those types; null stands for what may be missing."""
    shown, (record, _) = dict(SHOWN[event]), LINES[event]
    del shown["event"]
    written = json.loads(json.dumps(record.fields()))
    assert list(shown) == list(written)
    for name, value in shown.items():
        kinds = {type(value), type(written[name])}
        assert len(kinds - {type(None)}) <= 1 or kinds <= {int, float, str}, name


def test_every_cause_of_idling_is_explained() -> None:
    """The table has a row for each."""
    rows = set(re.findall(r"^\| `([a-z ]+)` \|", TEXT, re.MULTILINE)) - {"cause"}
    assert rows == {cause.value for cause in Cause}


def test_the_schema_s_number_is_told() -> None:
    """The text says which it describes."""
    assert f"schema {records.SCHEMA}" in TEXT
    assert SHOWN["run"]["schema"] == records.SCHEMA

"""From a folder of rank*.jsonl to a run. What cannot be read is told, and the rest is read.

A run that died leaves a line cut off, a full disk a gap, another version fields of its own: none
of it may hide what is there.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rrfp_async.inspection.lines import NEWEST, RunLine
from rrfp_async.inspection.parsing import parse
from rrfp_async.inspection.run import RankTrace, Run

_NAME = re.compile(r"rank(\d+)\.jsonl")
_TIMES = ("time_s", "start_s")
_HEAD_MOST = 64
_TOLD_MOST = 8
_REASONS_MOST = 3


def read_run(folder: str | Path) -> Run:
    """Read all record files of a folder.

    Returns:
        The run; what could not be read is in its `problems`.

    Raises:
        ValueError: If there is no such folder, or nothing in it can be read.
    """
    paths = _record_files(Path(folder))
    problems: list[str] = []
    origin_s = min((_first_time_s(path) for path in paths.values()), default=0.0)
    origin_s = 0.0 if origin_s == float("inf") else origin_s
    ranks = {rank: _read_rank(rank, path, origin_s, problems) for rank, path in paths.items()}
    if not any(trace.steps or trace.failure for trace in ranks.values()):
        told = "; ".join(problems[:_REASONS_MOST]) or "the files are empty"
        raise ValueError(f"{folder} holds no record of a step ({told}): let a step begin first")
    problems += _about_missing(ranks)
    return Run(str(folder), ranks, tuple(problems))


def _record_files(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the trace_dir of a run")
    found = {}
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None:
            found[int(match[1])] = path
    if not found:
        raise ValueError(
            f"{folder} holds no rank*.jsonl: give the folder that a run got as "
            f"Config(trace_dir=...) or --trace-dir"
        )
    return dict(sorted(found.items()))


def _first_time_s(path: Path) -> float:
    """The first time in the file on the clock of rank 0; infinite if it has none."""
    offset_s = 0.0
    with path.open("rb") as file:
        for _, line in zip(range(_HEAD_MOST), file, strict=False):
            fields = _decoded(line)
            if fields is None:
                continue
            offset_s = float(fields.get("clock_offset_s") or offset_s)
            for name in _TIMES:
                if isinstance(fields.get(name), int | float):
                    return float(fields[name]) + offset_s
    return float("inf")


def _decoded(line: bytes) -> dict[str, Any] | None:
    """The JSON object on the line; None if there is none."""
    try:
        fields = json.loads(line)
    except ValueError:  # no JSON, or no UTF-8
        return None
    return fields if isinstance(fields, dict) and "event" in fields else None


def _read_rank(rank: int, path: Path, origin_s: float, problems: list[str]) -> RankTrace:
    trace = RankTrace(rank)
    unknown: Counter[str] = Counter()
    unread: list[tuple[int, str]] = []
    schemas: set[int] = set()
    shift_s, number, ends = -origin_s, 0, True
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            ends = text.endswith(b"\n")
            fields = _decoded(text)
            if fields is None:
                unread.append((number, "no JSON object with an event"))
                continue
            if isinstance(fields.get("schema"), int):
                schemas.add(fields["schema"])
            try:
                line = parse(fields, shift_s)
            except (KeyError, TypeError, ValueError) as error:
                unread.append((number, _told(fields["event"], error)))
                continue
            if line is None:
                unknown[str(fields["event"])] += 1
                continue
            if isinstance(line, RunLine):
                shift_s = line.clock_offset_s - origin_s
            trace.add(line)
    _order(trace)
    cut = bool(unread) and unread[-1][0] == number and not ends
    if cut:
        unread.pop()
    problems += _about_file(path.name, trace, schemas, unread, unknown)
    if cut:
        problems.append(
            f"{path.name}, line {number} is cut off: the run was killed while it wrote, or is "
            f"still writing; the line is left out"
        )
    return trace


def _told(event: object, error: Exception) -> str:
    what = f"lacks the field {error}" if isinstance(error, KeyError) else str(error)
    return f"{event!r} {what}"


def _order(trace: RankTrace) -> None:
    """By time: an idle span is written when it ends, beside others."""
    for step in trace.steps.values():
        step.idles.sort(key=lambda idle: idle.start_s)


def _about_file(
    name: str,
    trace: RankTrace,
    schemas: Iterable[int],
    unread: list[tuple[int, str]],
    unknown: Counter[str],
) -> list[str]:
    told = []
    schema = max(schemas, default=0)
    if schema > NEWEST:
        told.append(
            f"{name} is of schema {schema}, this rrfp knows {NEWEST}: what is new in it is left "
            f"out; upgrade rrfp_async to see it"
        )
    elif schemas and schema < NEWEST:
        told.append(
            f"{name} is of schema {schema}: it has decisions but no times; record "
            f"again with this version to see more"
        )
    elif trace.head is None and trace.steps:
        told.append(f"{name} has no first line: its clock is taken for rank 0's")
    if unknown:
        told.append(f"{name}: events not known here are left out: {_counts(unknown)}")
    for number, what in unread[:_TOLD_MOST]:
        told.append(f"{name}, line {number} cannot be read ({what}): it is left out")
    if len(unread) > _TOLD_MOST:
        told.append(f"{name}: {len(unread) - _TOLD_MOST} more lines cannot be read")
    if trace.lost:
        told.append(f"{name} lacks {trace.lost} records that the writer lost: sums may be short")
    return told


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} of {name!r}" for name, count in counter.items())


def _about_missing(ranks: dict[int, RankTrace]) -> list[str]:
    """Ranks that left no file, or no step."""
    sizes = [trace.head.world_size for trace in ranks.values() if trace.head is not None]
    missing = sorted(set(range(max(sizes, default=0))) - set(ranks))
    told = []
    if missing:
        names = ", ".join(f"rank{rank}.jsonl" for rank in missing[:_TOLD_MOST])
        more = f" and {len(missing) - _TOLD_MOST} more" if len(missing) > _TOLD_MOST else ""
        told.append(
            f"{names}{more} not found, though the run has {max(sizes)} ranks: copy from the hosts "
            f"they ran on; the others are shown"
        )
    silent = [trace.rank for trace in ranks.values() if not trace.steps and not trace.failure]
    told += [f"rank{rank}.jsonl has no step" for rank in silent[:_TOLD_MOST]]
    return told

"""Reports and comparisons as tables for people, on a terminal or a page. By rich."""

import statistics
from collections import defaultdict
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from rrfp_async.inspection.compare import Change, Comparison
from rrfp_async.inspection.report import EdgeTimes, Report, Row
from rrfp_async.inspection.run import Run
from rrfp_async.inspection.wording import idle_words, moment, seconds, size

_ROWS_MOST = 64
_SHOWN = 10
_PARTS = ("step_s", "compute_s", "blocking_s", "coordination_s", "other_s")


def show_report(console: Console, run: Run, found: Report) -> None:
    """Print a report."""
    console.print(_opening(run), markup=False)
    if found.failure is not None:
        console.print(f"{found.failure} More: rrfp explain {run.folder}", markup=False)
    _show(console, *_time_table(found.rows))
    _show(console, "Longest idle spans", _idle_table(found))
    _show(
        console, "Slowest edges (from the end of the task to the tensors' arrival)", _edges(found)
    )
    _show(console, "Tasks far from the median of their stage and kind", _outliers(found))
    _show(console, "Stages slower than others of their kind", _slow_stages(found))


def _opening(run: Run) -> str:
    steps = run.step_numbers()
    told = f"{run.folder}: {len(run.ranks)} ranks, {len(steps)} steps"
    told = told.removesuffix("s") if len(steps) == 1 else told
    if run.heads:
        head = run.heads[0]
        told += f", {head.stages} stages, hint {head.hint}, limit {head.limit}"
        errors = [head.clock_error_s for head in run.heads if head.clock_error_s]
        if errors:
            told += f"; clocks agree within {seconds(max(errors))}"
    return told + (", simulated" if run.simulated else "")


def _show(console: Console, title: str, table: Table | None) -> None:
    if table is not None and table.row_count:
        console.print()
        console.print(title, style="bold", markup=False, highlight=False)
        console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        words = name in ("task", "why", "edge", "what", "what moved", "worst")
        table.add_column(name, justify="left" if words else "right", overflow="fold")
    return table


def _time_table(rows: tuple[Row, ...]) -> tuple[str, Table]:
    """Every row, or with too many of them medians per rank."""
    title = "Where the time went, per step and rank (seconds; bubble: share without a task)"
    table = _table("step", "rank", *_PARTS, "bubble", "peak", "decisions", "loss")
    if len(rows) <= _ROWS_MOST:
        for row in rows:
            table.add_row(str(row.step), *_cells(row))
        return title, table
    ranks: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        ranks[row.rank].append(row)
    for rank, own in ranks.items():
        parts = [_median(getattr(row, part) for row in own) for part in (*_PARTS, "bubble")]
        peaks = [row.peak_in_flight for row in own if row.peak_in_flight is not None]
        peak = str(max(peaks)) if peaks else "-"
        decisions = sum(row.decisions for row in own)
        table.add_row(f"{len(own)} steps", str(rank), *parts, peak, str(decisions), "")
    return f"{title}; medians over the steps, --json has each", table


def _cells(row: Row) -> list[str]:
    parts = [getattr(row, part) for part in _PARTS]
    return [
        str(row.rank),
        *("-" if part is None else f"{round(part, 6) + 0.0:.6f}" for part in parts),
        "-" if row.bubble is None else f"{row.bubble:.1%}",
        "-" if row.peak_in_flight is None else str(row.peak_in_flight),
        str(row.decisions),
        "" if row.loss is None else f"{row.loss:.4g}",
    ]


def _median(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.6f}" if known else "-"


def _idle_table(found: Report) -> Table:
    table = _table("step", "rank", "from", "for", "why")
    for idle in found.idles:
        span = idle.span
        when = (moment(span.start_s), seconds(span.duration_s))
        table.add_row(str(span.step), str(idle.rank), *when, idle_words(span))
    return table


def _edges(found: Report) -> Table:
    table = _table("edge", "what moved", "ranks", "count", "size", "median", "slowest", "worst")
    for edge in found.edges[:_SHOWN]:
        table.add_row(*_edge_cells(edge))
    return table


def _edge_cells(edge: EdgeTimes) -> list[str]:
    return [
        str(edge.edge),
        "gradients" if edge.gradient else "activations",
        f"{edge.source} to {edge.target}",
        str(edge.count),
        size(edge.size_bytes),
        seconds(edge.median_s),
        seconds(edge.worst_s),
        f"{edge.worst} in step {edge.worst_step}",
    ]


def _outliers(found: Report) -> Table:
    table = _table("step", "rank", "task", "took", "median", "times")
    for task in found.outliers:
        times = f"{task.duration_s / task.median_s:.1f}" if task.median_s else "-"
        took = (seconds(task.duration_s), seconds(task.median_s))
        table.add_row(str(task.step), str(task.rank), str(task.task), *took, times)
    return table


def _slow_stages(found: Report) -> Table:
    """Stages whose tasks take 1.2 times those of the median stage, and more."""
    table = _table("stage", "rank", "kind", "median", "others", "times")
    kinds = defaultdict(list)
    for times in found.kinds:
        kinds[times.kind].append(times.median_s)
    slow = []
    for times in found.kinds:
        usual_s = statistics.median(kinds[times.kind])
        if usual_s > 0 and times.median_s > 1.2 * usual_s:
            slow.append((times.median_s / usual_s, usual_s, times))
    for ratio, usual_s, times in sorted(slow, key=lambda found: -found[0])[:_SHOWN]:
        took = (seconds(times.median_s), seconds(usual_s), f"{ratio:.1f}")
        table.add_row(str(times.stage), str(times.rank), times.kind.value, *took)
    return table


def show_comparison(console: Console, first: Run, second: Run, found: Comparison) -> None:
    """Print a comparison."""
    console.print(f"A: {_opening(first)}", markup=False)
    console.print(f"B: {_opening(second)}", markup=False)
    _show(
        console,
        "The step, medians over steps",
        _changes(found.sums, len(found.sums), all_of_them=True),
    )
    _show(console, "Ranks, largest changes", _changes(found.ranks, _SHOWN))
    _show(console, "Tasks, largest changes of the median", _changes(found.tasks, _SHOWN))
    _show(console, "Edges, largest changes of the median way", _changes(found.edges, _SHOWN))


def _changes(changes: tuple[Change, ...], most: int, *, all_of_them: bool = False) -> Table:
    table = _table("what", "A", "B", "B - A", "B / A")
    for change in changes[:most]:
        if change.is_none and not all_of_them:
            continue
        before, after = change.before, change.after
        both = before is not None and after is not None
        table.add_row(
            change.what,
            "-" if before is None else seconds(before),
            "-" if after is None else seconds(after),
            seconds(change.difference_s) if both else "-",
            f"{after / before:.2f}" if before and after is not None else "-",
        )
    return table

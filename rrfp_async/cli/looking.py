"""`report`, `timeline`, `explain`, `compare` and `export`: what a run has recorded."""

import dataclasses
import enum
import json
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rrfp_async.cli.telling import print_error
from rrfp_async.ids import TaskId
from rrfp_async.inspection.boxes import picture
from rrfp_async.inspection.compare import compare
from rrfp_async.inspection.explain import explain
from rrfp_async.inspection.perfetto import chrome_trace
from rrfp_async.inspection.reading import read_run
from rrfp_async.inspection.report import report
from rrfp_async.inspection.run import Run
from rrfp_async.inspection.tables import show_comparison, show_report

_WIDTH = 140

_DRAWN_BY = {
    ".png": ("rrfp_async.inspection.image", "draw_image"),
    ".svg": ("rrfp_async.inspection.image", "draw_image"),
    ".html": ("rrfp_async.inspection.page", "write_page"),
}

app = typer.Typer()

_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="What a run got as trace_dir.")]
_Step = Annotated[int | None, typer.Option(help="One step only, by its number.")]
_DrawnStep = Annotated[
    int | None, typer.Option(help="Its number; default the last that every rank ended.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("report")
def run_report(
    folder: _Folder,
    *,
    step: _Step = None,
    as_json: _Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a page there, print no tables.")] = None,
) -> None:
    """Where each rank's time went, what idled and why, slow edges and tasks."""
    if html is not None:
        _check_file("--html", html)
    run = _read(folder)
    found = report(run, step=step)
    if as_json:
        typer.echo(json.dumps({**_plain(found), "problems": run.problems}))
    if html is not None:
        console = Console(record=True, width=_WIDTH, file=StringIO())
        for problem in run.problems:
            console.print(f"note: {problem}", markup=False)
        show_report(console, run, found)
        html.write_text(console.export_html(), encoding="utf-8")
    if html is None and not as_json:
        show_report(_console(), run, found)


@app.command("timeline")
def draw_timeline(
    folder: _Folder,
    *,
    out: Annotated[Path, typer.Option(help="The file: .png, .svg or .html.")],
    step: _DrawnStep = None,
) -> None:
    """Draw a step: ranks down, time across; the page has zoom, and a reason for every box."""
    if out.suffix not in _DRAWN_BY:
        raise ValueError(f"--out {out} must end in one of {', '.join(_DRAWN_BY)}")
    _check_file("--out", out)
    shown = picture(_read(folder), step)
    module, name = _DRAWN_BY[out.suffix]
    try:
        draw = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ValueError(
            f"--out {out} needs {package}: pip install 'rrfp-async[pictures]'"
        ) from error
    draw(shown, out)


@app.command("explain")
def tell_story(
    folder: _Folder,
    *,
    rank: Annotated[int | None, typer.Option(help="Whose moment, or whose task.")] = None,
    at: Annotated[
        float | None, typer.Option(help="A moment, in seconds since the first step began.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="A task, such as 2F5.")] = None,
    step: _DrawnStep = None,
) -> None:
    """Why a rank waited or a task ran when it did; unasked, the failure or the longest wait.

    That is the longest before a task: what a rank waits for others when it is done is left out.
    """
    which = None if task is None else TaskId.parse(task)
    story = explain(_read(folder), rank=rank, at_s=at, task=which, step=step)
    for line in story.lines:
        typer.echo(line)


@app.command("compare")
def compare_runs(
    first: Annotated[Path, typer.Argument(metavar="DIR_A", help="One trace_dir.")],
    second: Annotated[Path, typer.Argument(metavar="DIR_B", help="Another.")],
    *,
    as_json: _Json = False,
) -> None:
    """Two runs beside each other: medians over their steps, the largest changes first."""
    runs = _read(first), _read(second)
    found = compare(*runs)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
    else:
        show_comparison(_console(), *runs, found)


@app.command("export")
def export_run(
    folder: _Folder,
    *,
    perfetto: Annotated[Path, typer.Option(help="The file, for https://ui.perfetto.dev.")],
) -> None:
    """Write the run as a Chrome trace, with arrows from senders to receivers."""
    _check_file("--perfetto", perfetto)
    trace = chrome_trace(_read(folder))
    perfetto.write_text(json.dumps(trace), encoding="utf-8")


def _check_file(option: str, path: Path) -> None:
    """Refuse, before anything is read, a file that could not be written.

    Raises:
        ValueError: If its folder is not there, or it is a folder itself.
    """
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: give the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}: make it first")


def _read(folder: Path) -> Run:
    """The run; what could not be read is told on stderr."""
    run = read_run(folder)
    for problem in run.problems:
        print_error(f"note: {problem}")
    return run


def _console() -> Console:
    """As wide as the terminal; into a file or pipe, wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def _plain(value: object) -> Any:
    """What a report holds as what JSON knows."""
    if isinstance(value, TaskId):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, list | tuple):  # an edge is a pair
        return [_plain(one) for one in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {part.name: _plain(getattr(value, part.name)) for part in dataclasses.fields(value)}
    return value

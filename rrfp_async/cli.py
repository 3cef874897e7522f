"""The command line: what can be seen and tried without a training run.

It reads options and prints; what it shows is computed elsewhere.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rrfp_async.config import Config
from rrfp_async.errors import RrfpError
from rrfp_async.hints import FILES, HINTS
from rrfp_async.sim.costs import JITTERS, PROFILES, TASK_S, draw_costs, read_costs
from rrfp_async.sim.paper import count_simulations, paper_grid
from rrfp_async.sim.simulate import Result, simulate
from rrfp_async.topology import Topology

_SHOWN_TASKS_LEAST = 20_000

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Readiness-first pipeline-parallel training: hints, and the virtual cluster.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for bad input, 1 for a failed run."""
    try:
        app(None if arguments is None else list(arguments))
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except (ValueError, OSError) as error:
        return _tell(error, 2)
    except RrfpError as error:
        return _tell(error, 1)
    return 0


@app.command("hints")
def list_hints() -> None:
    """List the hint orders, one line each."""
    for name, hint in HINTS.items():
        typer.echo(f"{name:<16}{hint.summary}")
    for form, (summary, _) in FILES.items():
        typer.echo(f"{form:<16}{summary}")


@app.command("simulate")
def run_simulation(
    *,
    stages: Annotated[
        int | None, typer.Option(help="Stages over all ranks, ranks x chunks; default 8.")
    ] = None,
    chunks: Annotated[int, typer.Option(help="Stages (model chunks) per rank.")] = 1,
    placement: Annotated[str, typer.Option(help="Of the chunks: loop or v.")] = "loop",
    microbatches: Annotated[int | None, typer.Option(help="Microbatches; default 32.")] = None,
    profile: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(PROFILES)}; default llm.")
    ] = None,
    jitter: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(JITTERS)}; default J0.")
    ] = None,
    delay: Annotated[
        float | None, typer.Option(help="Median transfer delay, seconds; default 0.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draws; default 0.")] = None,
    costs: Annotated[
        Path | None, typer.Option(help="JSON tables instead of a profile, jitter and delay.")
    ] = None,
    task_time: Annotated[
        float | None, typer.Option(help="Seconds of F, I and W each; default 0.01.")
    ] = None,
    hint: Annotated[str, typer.Option(help="See `python -m rrfp_async hints`.")] = "bf",
    binding: Annotated[
        bool | None, typer.Option(help="Execute a listed hint as it stands.")
    ] = None,
    limit: Annotated[str, typer.Option(help="Forwards in flight per rank, or auto.")] = "auto",
    free_order: Annotated[
        bool, typer.Option("--free-order", help="Accumulate gradients in any order.")
    ] = False,
    dispatch_cost: Annotated[float, typer.Option(help="Seconds per dispatched task.")] = 0.0,
    trace_dir: Annotated[
        Path | None, typer.Option(help="Write each rank's dispatch log there.")
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="The paper's evaluation instead, --seeds draws each.")
    ] = False,
    seeds: Annotated[int, typer.Option(help="Of --paper.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run one training step on the virtual cluster: real dispatchers, virtual time."""
    if paper:
        _run_paper(seeds, as_json=as_json)
        return
    if costs is None:
        drawn = draw_costs(
            stages=8 if stages is None else stages,
            microbatches=32 if microbatches is None else microbatches,
            profile="llm" if profile is None else profile,
            jitter="J0" if jitter is None else jitter,
            delay_s=0.0 if delay is None else delay,
            seed=0 if seed is None else seed,
            task_s=TASK_S if task_time is None else task_time,
        )
    else:
        drawn = read_costs(costs)
        ignored = {"profile": profile, "jitter": jitter, "delay": delay, "seed": seed}
        _warn_of_ignored({**ignored, "task-time": task_time})
        _check_size("stages", stages, drawn.stages)
        _check_size("microbatches", microbatches, drawn.microbatches)
    config = Config(
        microbatches=drawn.microbatches,
        hint=hint,
        binding=binding,
        limit=_limit(limit),
        deterministic=not free_order,
        trace_dir=trace_dir,
    )
    topology = _topology(drawn.stages, chunks, placement)
    tasks = 4 * drawn.stages * drawn.microbatches
    with _progress(tasks, "simulating, 1F1B beside it", least=_SHOWN_TASKS_LEAST) as done:
        result = simulate(drawn, config, topology, dispatch_s=dispatch_cost, done=done)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
    else:
        _show(result)


def _run_paper(seeds: int, *, as_json: bool) -> None:
    with _progress(count_simulations(seeds), "the paper's grid", least=0) as done:
        rows = paper_grid(seeds, done)
    if as_json:
        typer.echo(json.dumps({"rows": [dataclasses.asdict(row) for row in rows]}))
        return
    table = Table("topic", "setting", "measure", "paper", "ours", box=None)
    for row in rows:
        numbers = (f"{row.paper:.2f}", f"{row.ours:.2f}")
        table.add_row(row.topic, row.setting, row.measure, *numbers)
    Console(width=100).print(table)


def _topology(stages: int, chunks: int, placement: str) -> Topology:
    if chunks < 1 or stages % chunks:
        raise ValueError(
            f"--chunks {chunks} does not divide the {stages} stages: give the stages per rank, "
            f"at least 1"
        )
    return Topology(stages // chunks, chunks=chunks, placement=placement)


def _check_size(name: str, given: int | None, found: int) -> None:
    if given is not None and given != found:
        raise ValueError(f"--{name} {given}, but --costs holds {found}: leave --{name} out")


def _warn_of_ignored(options: Mapping[str, object]) -> None:
    given = ", ".join(f"--{name}" for name, value in options.items() if value is not None)
    if given:
        _print_error(f"warning: --costs says it all, so {given} has no effect: leave it out")


def _limit(word: str) -> int | Literal["auto"]:
    if word == "auto":
        return "auto"
    if not word.isdecimal() or int(word) < 1:
        raise ValueError(f"--limit {word!r} must be auto or a whole number of at least 1")
    return int(word)


@contextmanager
def _progress(total: int, label: str, *, least: int) -> Iterator[Callable[[], None]]:
    """A progress bar for what is long, on a terminal."""
    console = Console(stderr=True)
    if total < least or not console.is_terminal:
        yield lambda: None
        return
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(label, total=total)
        yield lambda: progress.advance(bar)


def _show(result: Result) -> None:
    console = Console()
    for name in ("makespan_s", "speedup_vs_1f1b", "bound_s", "ratio_to_bound"):
        console.print(f"{name:<18} {getattr(result, name):.4f}")
    console.print(f"{'blocking_fraction':<18} {result.blocking_fraction:.4f}")
    console.print(f"{'wall_s':<18} {result.wall_s:.2f}")
    table = Table("rank", "compute_s", "blocking_s", "peak_in_flight", box=None)
    rows = zip(result.compute_s, result.blocking_s, result.peak_in_flight, strict=True)
    for stage, (compute_s, blocking_s, peak) in enumerate(rows):
        table.add_row(str(stage), f"{compute_s:.4f}", f"{blocking_s:.4f}", str(peak))
    console.print(table)


def _tell(error: BaseException, status: int) -> int:
    _print_error(f"error: {error}")
    return status


def _print_error(text: str) -> None:
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)

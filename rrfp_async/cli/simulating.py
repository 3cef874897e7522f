"""`simulate`: what can be tried without a training run."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rrfp_async.cli.telling import print_error
from rrfp_async.config import TP_PROTOCOLS, Config
from rrfp_async.hints import AUTO
from rrfp_async.sim.costs import JITTERS, PROFILES, Costs, draw_costs, read_costs
from rrfp_async.sim.lateness import Lateness
from rrfp_async.sim.paper import count_simulations, paper_grid
from rrfp_async.sim.simulate import Result, simulate
from rrfp_async.topology import Topology

_SHOWN_TASKS_LEAST = 20_000

app = typer.Typer()


_Stages = Annotated[
    int | None, typer.Option(help="Stages over all ranks, ranks x chunks; default 8.")
]
_Profile = Annotated[str | None, typer.Option(help=f"One of {', '.join(PROFILES)}; default llm.")]
_Jitter = Annotated[str | None, typer.Option(help=f"One of {', '.join(JITTERS)}; default J0.")]
_Delay = Annotated[float | None, typer.Option(help="Median transfer delay, seconds; default 0.")]
_Tables = Annotated[Path | None, typer.Option(help="JSON tables instead of what is drawn.")]
_TaskTime = Annotated[float | None, typer.Option(help="Seconds of F, I and W; default 0.01.")]
_Binding = Annotated[bool | None, typer.Option(help="Execute a listed hint as it stands.")]
_FreeOrder = Annotated[
    bool, typer.Option("--free-order", help="Accumulate gradients in any order.")
]
_TraceDir = Annotated[Path | None, typer.Option(help="Write each rank's dispatch log there.")]
_Tp = Annotated[int, typer.Option(help="Ranks that compute a stage together.")]
_Dp = Annotated[int, typer.Option(help="Replicas of the pipeline, each with draws of its own.")]
_Protocol = Annotated[
    str, typer.Option(help=f"How they agree on tasks: {' or '.join(TP_PROTOCOLS)}.")
]
_Control = Annotated[float, typer.Option(help="Seconds that agreement messages take.")]
_Skew = Annotated[float, typer.Option(help="Tensors are late by 0 to this, seconds, per member.")]
_Paper = Annotated[
    bool, typer.Option("--paper", help="The paper's evaluation instead, --seeds draws each.")
]

_DEFAULTS = {"stages": 8, "microbatches": 32, "profile": "llm", "jitter": "J0", "delay_s": 0.0}
_OPTION_OF = {"delay_s": "delay", "task_s": "task-time"}


@app.command("simulate")
def run_simulation(
    *,
    stages: _Stages = None,
    chunks: Annotated[int, typer.Option(help="Stages (model chunks) per rank.")] = 1,
    placement: Annotated[str, typer.Option(help="Of the chunks: loop or v.")] = "loop",
    microbatches: Annotated[int | None, typer.Option(help="Microbatches; default 32.")] = None,
    profile: _Profile = None,
    jitter: _Jitter = None,
    delay: _Delay = None,
    seed: Annotated[int | None, typer.Option(help="Of the draws; default 0.")] = None,
    costs: _Tables = None,
    task_time: _TaskTime = None,
    hint: Annotated[str, typer.Option(help="See `python -m rrfp_async hints`.")] = AUTO,
    binding: _Binding = None,
    limit: Annotated[str, typer.Option(help="Forwards in flight per rank, or auto.")] = "auto",
    free_order: _FreeOrder = False,
    dispatch_cost: Annotated[float, typer.Option(help="Seconds per dispatched task.")] = 0.0,
    tp: _Tp = 1,
    dp: _Dp = 1,
    tp_protocol: _Protocol = "leader",
    control_delay: _Control = 0.0,
    skew: _Skew = 0.0,
    trace_dir: _TraceDir = None,
    paper: _Paper = False,
    seeds: Annotated[int, typer.Option(help="Of --paper.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run one training step on the virtual cluster: real dispatchers, virtual time."""
    if paper:
        _run_paper(seeds, as_json=as_json)
        return
    lateness = Lateness(control_delay, skew, 0 if seed is None else seed)
    sizes = {"stages": stages, "microbatches": microbatches}
    draws = {"profile": profile, "jitter": jitter, "delay_s": delay, "task_s": task_time}
    if costs is None or not skew:  # else the seed has its effect
        draws["seed"] = seed
    found = _costs(costs, sizes, draws, replicas=dp)
    config = Config(
        microbatches=found[0].microbatches,
        hint=hint,
        binding=binding,
        limit=_limit(limit),
        deterministic=not free_order,
        tp_protocol=tp_protocol,  # type: ignore[arg-type] # it checks
        trace_dir=trace_dir,
    )
    topology = _topology(found[0].stages, chunks, placement, dp=dp, tp=tp)
    tasks = 2 * found[0].stages * found[0].microbatches * (dp * tp + len(set(found)))
    with _progress(tasks, "simulating, 1F1B beside it", least=_SHOWN_TASKS_LEAST) as done:
        result = simulate(
            found, config, topology, dispatch_s=dispatch_cost, lateness=lateness, done=done
        )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
    else:
        _show(result)


def _costs(
    path: Path | None,
    sizes: Mapping[str, int | None],
    draws: Mapping[str, Any],
    *,
    replicas: int,
) -> list[Costs]:
    """The costs in the file, which says it all, or drawn as the options say, for each replica."""
    if path is None:
        given = {name: value for name, value in {**sizes, **draws}.items() if value is not None}
        arguments: dict[str, Any] = {**_DEFAULTS, "seed": 0, **given}
        return [draw_costs(**arguments, replica=replica) for replica in range(max(1, replicas))]
    found = read_costs(path)
    _warn_of_ignored({_OPTION_OF.get(name, name): value for name, value in draws.items()})
    _check_size("stages", sizes["stages"], found.stages)
    _check_size("microbatches", sizes["microbatches"], found.microbatches)
    return [found] * max(1, replicas)


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


def _topology(stages: int, chunks: int, placement: str, *, dp: int, tp: int) -> Topology:
    if chunks < 1 or stages % chunks:
        raise ValueError(
            f"--chunks {chunks} does not divide the {stages} stages: give the stages per rank, "
            f"at least 1"
        )
    return Topology(stages // chunks, chunks=chunks, placement=placement, dp=dp, tp=tp)


def _check_size(name: str, given: int | None, found: int) -> None:
    if given is not None and given != found:
        raise ValueError(f"--{name} {given}, but --costs holds {found}: leave --{name} out")


def _warn_of_ignored(options: Mapping[str, object]) -> None:
    given = ", ".join(f"--{name}" for name, value in options.items() if value is not None)
    if given:
        print_error(f"warning: --costs says it all, so {given} has no effect: leave it out")


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
    console.print(f"{'tp_wait_share':<18} {result.tp_wait_share:.4f}")
    console.print(f"{'tp_retries':<18} {result.tp_retries}")
    console.print(f"{'wall_s':<18} {result.wall_s:.2f}")
    table = Table("rank", "compute_s", "blocking_s", "peak_in_flight", box=None)
    rows = zip(result.compute_s, result.blocking_s, result.peak_in_flight, strict=True)
    for rank, (compute_s, blocking_s, peak) in enumerate(rows):
        table.add_row(str(rank), f"{compute_s:.4f}", f"{blocking_s:.4f}", str(peak))
    console.print(table)

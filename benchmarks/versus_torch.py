"""Our hint orders beside torch's schedules: the same modules, batch and delays, in one launch.

    python -m benchmarks.versus_torch --pp 8 --microbatches 16 --jitter J0,J2
    python -m benchmarks.versus_torch --pp 4,8 --microbatches 16,64 \
        --profile balanced,multimodal --jitter J0,J2,J3 --json

Starts its own ranks with torchrun, one process a rank. Stages sleep inside autograd: 10 ms for F,
10 and 10 for the two halves of the backward, half of it where a rank has two stages, plus the
paper's jitter. A step's delays are drawn per rank, step, kind and microbatch, so every system
suffers the same. Systems take turns: one step of each, then the next. Before anything is timed,
every gradient is compared with the unpartitioned model's: ours to the last bit, torch's to
rounding, for it adds them up otherwise.

The bound is what no order can beat (a rank's work after its first possible start, two stages a
rank in a V). Peaks count the microbatches between F and W of a rank, in whole-rank stages. CPU time
is of all ranks, per task. Overhead is what a step took beyond a replay of the same decisions in
which nothing but the tasks takes time, per task on the path that decides the replay; a gap, the
time from when all that a task needed was done to when it began. Ours only: torch's lists may mix
whole backwards with halves.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import rrfp_async
from benchmarks.deepspeed_peer import DEEPSPEED, DeepSpeedPeer, unavailable
from benchmarks.emulation import Emulated, SleepingLayer, Span, batch_of
from benchmarks.launching import rows_from
from benchmarks.options import among, count, counts
from benchmarks.peers import (
    SEED,
    SYSTEMS,
    WIDTH,
    Peer,
    System,
    TorchPeer,
    loss_fn,
    open_peers,
)
from benchmarks.timeline import peak_activations, percentile, replayed, task_gaps_s
from rrfp_async.sim.costs import JITTERS, Costs, Profile, draw_costs
from rrfp_async.sim.simulate import bound_s

TASK_S = 0.010
MAKERS = {"torch": TorchPeer, "deepspeed": DeepSpeedPeer}
PROFILES = {"balanced": Profile(), "multimodal": Profile(1.3, encoder_share=0.25)}
"""`balanced`: equal ranks. `multimodal`: an encoder on the first quarter of the ranks, whose work
varies by one lognormal(0, 0.6) factor per microbatch; the last rank takes 1.3 times as long."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What all systems are given."""

    pp: int
    microbatches: int
    profile: str
    jitter: str
    rows: int

    def costs(self, step: int) -> Costs:
        """What the tasks of every rank take in a step."""
        return draw_costs(
            stages=self.pp,
            microbatches=self.microbatches,
            profile=PROFILES[self.profile],
            jitter=self.jitter,
            delay_s=0.0,
            seed=step,
            task_s=TASK_S,
        )


@dataclass
class Samples:
    """What the steps of one system came to, on rank 0."""

    step_s: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    cpu_s_per_task: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    overhead_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank tells of one step of one system."""

    spans: list[Span]
    cpu_s: float


# -- one rank ------------------------------------------------------------------------------------


async def run_problem(problem: Problem, systems: Sequence[System], steps: int) -> list[Samples]:
    """Every system's steps, by turns; complete on rank 0."""
    samples = [Samples() for _ in systems]
    async with AsyncExitStack() as resources:
        peers = await open_peers(
            systems, problem.pp, problem.microbatches, problem.rows, resources, makers=MAKERS
        )
        reference = reference_gradients(problem)
        for peer in peers:
            await peer.step()
            check_gradients(peer, reference)
        for step in range(steps):
            for peer, of_peer in zip(peers, samples, strict=True):
                await run_step(problem, peer, step, of_peer)
    return samples


async def run_step(problem: Problem, peer: Peer, step: int, samples: Samples) -> None:
    """One timed step; what all ranks tell of it goes to rank 0's samples."""
    costs = problem.costs(step)
    for layer in peer.layers:
        set_durations(layer.emulated, costs, peer)
    peer.forget_gradients()
    gc.collect()
    dist.barrier()
    begun_s, cpu_begun_s = time.perf_counter(), time.process_time()
    await peer.step()
    cpu_s = time.process_time() - cpu_begun_s
    dist.barrier()
    step_s = time.perf_counter() - begun_s
    spans = sorted(
        (span for layer in peer.layers for span in layer.emulated.spans),
        key=lambda span: span.begun_s,
    )
    told: list[Any] = [None] * problem.pp
    dist.gather_object(Told(spans, cpu_s), told if dist.get_rank() == 0 else None)
    if dist.get_rank() == 0:
        note_step(peer, step_s, told, samples)


def set_durations(emulated: Emulated, costs: Costs, peer: Peer) -> None:
    """What the stage's tasks take in the coming step."""
    rank = peer.topology.rank_of(emulated.stage)
    tables = {"F": costs.forward_s, "I": costs.backward_input_s, "W": costs.weight_s}
    chunks = peer.system.chunks
    emulated.duration = lambda kind, microbatch: tables[kind][rank][microbatch] / chunks
    emulated.spans = []


def note_step(peer: Peer, step_s: float, told: list[Told], samples: Samples) -> None:
    """Reckon with what the ranks told."""
    system, topology = peer.system, peer.topology
    spans = [of_rank.spans for of_rank in told]
    kinds = 3 if system.split else 2
    tasks = topology.num_stages * peer.microbatches * kinds
    samples.step_s.append(step_s)
    samples.peaks.append(peak_activations(spans, system.chunks))
    samples.cpu_s_per_task.append(sum(of_rank.cpu_s for of_rank in told) / tasks)
    if system.name != "rrfp_async":
        return  # whose tasks are whole or split, its schedule decides
    stages = topology.num_stages
    ideal = replayed(spans, split=system.split, stages=stages)
    samples.overhead_s.append((step_s - ideal.makespan_s) / ideal.path_tasks)
    samples.gaps_s += task_gaps_s(spans, split=system.split, stages=stages)


# -- gradients -----------------------------------------------------------------------------------


def reference_gradients(problem: Problem) -> dict[int, dict[int, list[torch.Tensor]]]:
    """The unpartitioned model's gradients, by the number of its layers and the layer."""
    return {problem.pp * chunks: _unpartitioned(problem.pp * chunks, problem) for chunks in (1, 2)}


def _unpartitioned(stages: int, problem: Problem) -> dict[int, list[torch.Tensor]]:
    layers = [
        SleepingLayer(WIDTH, Emulated(stage, lambda _kind, _microbatch: 0.0), SEED)
        for stage in range(stages)
    ]
    batch = batch_of(problem.microbatches, problem.rows, WIDTH)
    for part in batch.tensor_split(problem.microbatches):
        hidden = part
        for layer in layers:
            hidden = layer(hidden)
        (loss_fn(hidden, part) * (len(part) / len(batch))).backward()
    return {
        stage: [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
        for stage, layer in enumerate(layers)
    }


def check_gradients(peer: Peer, reference: dict[int, dict[int, list[torch.Tensor]]]) -> None:
    """Compare this rank's gradients with the unpartitioned model's.

    Raises:
        AssertionError: If they differ: ours at all, torch's by more than rounding.
    """
    expected = reference[peer.topology.num_stages]
    exact = {"rtol": 0.0, "atol": 0.0} if peer.system.name == "rrfp_async" else {}
    for layer in peer.layers:
        gradients = [parameter.grad for parameter in layer.parameters()]
        torch.testing.assert_close(gradients, expected[layer.emulated.stage], **exact)


# -- the table -----------------------------------------------------------------------------------


def rows_of(
    problem: Problem, systems: Sequence[System], samples: Sequence[Samples], steps: int
) -> list[dict[str, Any]]:
    """A row per system."""
    bounds_s = [_bound_s(problem, step) for step in range(steps)]
    medians = [statistics.median(of_system.step_s) for of_system in samples]
    theirs = [
        median for system, median in zip(systems, medians, strict=True) if system.name == "torch"
    ]
    rows = []
    for system, of_system, median in zip(systems, samples, medians, strict=True):
        row = {
            "system": system.name,
            "hint": system.hint,
            "pp": problem.pp,
            "microbatches": problem.microbatches,
            "profile": problem.profile,
            "jitter": problem.jitter,
            "step_ms": 1e3 * median,
            "ratio_to_bound": median / statistics.median(bounds_s),
            "ratio_to_best_torch": median / min(theirs) if theirs else None,
            "peak_activations": max(of_system.peaks),
            "cpu_ms_per_task": 1e3 * statistics.median(of_system.cpu_s_per_task),
        }
        if of_system.gaps_s:
            row |= {
                "overhead_ms_per_path_task": 1e3 * statistics.median(of_system.overhead_s),
                "gap_ms_median": 1e3 * statistics.median(of_system.gaps_s),
                "gap_ms_p99": 1e3 * percentile(of_system.gaps_s, 99),
            }
        rows.append(row)
    return rows


def _bound_s(problem: Problem, step: int) -> float:
    """Over the ranks, their work after their first possible start: two stages a rank in a V."""
    costs = problem.costs(step)
    topology = rrfp_async.Topology(problem.pp, chunks=2, placement="v")
    owners = [topology.rank_of(stage) for stage in range(topology.num_stages)]

    def halved(table: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(cost / 2 for cost in table[rank]) for rank in owners)

    nothing = tuple((0.0,) * problem.microbatches for _ in owners)
    tables = map(halved, (costs.forward_s, costs.backward_input_s, costs.weight_s))
    return bound_s(Costs(*tables, nothing, nothing), topology)


def show(rows: list[dict[str, Any]]) -> None:
    """The rows as tables, one for each problem."""
    keys = ("pp", "microbatches", "profile", "jitter")
    for values, group in itertools.groupby(rows, key=lambda row: [row[key] for key in keys]):
        pp, microbatches, profile, jitter = values
        of_problem = list(group)
        bound_ms = of_problem[0]["step_ms"] / of_problem[0]["ratio_to_bound"]
        table = Table(
            title=f"P={pp}, M={microbatches}, {profile}, {jitter}: bound {bound_ms:.0f} ms"
        )
        table.add_column("system", no_wrap=True)
        table.add_column("hint", no_wrap=True)
        names = (
            "step, ms",
            "/ bound",
            "/ best torch",
            "peak",
            "CPU ms",
            "overhead ms",
            "gap p99 ms",
        )
        for name in names:
            table.add_column(name)
        for row in of_problem:
            table.add_row(
                row["system"],
                row["hint"],
                f"{row['step_ms']:.0f}",
                f"{row['ratio_to_bound']:.3f}",
                _number(row["ratio_to_best_torch"]),
                f"{row['peak_activations']:g}",
                f"{row['cpu_ms_per_task']:.2f}",
                _number(row.get("overhead_ms_per_path_task")),
                _number(row.get("gap_ms_p99")),
            )
        Console(width=112).print(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


# -- the launch ----------------------------------------------------------------------------------


def run_rank(options: argparse.Namespace) -> None:
    """Be one rank of a launch; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    systems = [system for system in SYSTEMS if _is_wanted(system, options.systems)]
    if options.deepspeed and not skipped_of(options):
        systems.append(DEEPSPEED)
    rows: list[dict[str, Any]] = []
    for microbatches, profile, jitter in itertools.product(
        options.microbatches, options.profile, options.jitter
    ):
        problem = Problem(dist.get_world_size(), microbatches, profile, jitter, options.rows)
        samples = rrfp_async.run(run_problem(problem, systems, options.steps))
        if dist.get_rank() == 0:
            rows += rows_of(problem, systems, samples, options.steps)
            print(f"measured {problem}", file=sys.stderr)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def skipped_of(options: argparse.Namespace) -> list[dict[str, str]]:
    """The rows that were asked for and cannot be here, each with its reason."""
    reason = unavailable() if options.deepspeed else None
    return [{"system": DEEPSPEED.name, "reason": reason}] if reason else []


def _is_wanted(system: System, wanted: Sequence[str]) -> bool:
    return not wanted or f"{system.name}:{system.hint}" in wanted


def launch(options: argparse.Namespace, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Start the ranks of every pipeline size, one size after another; their rows."""
    return [row for pp in options.pp for row in rows_from("versus_torch", *arguments, ranks=pp)]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line, checked."""
    names = [f"{system.name}:{system.hint}" for system in SYSTEMS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pp", type=counts(), default=[8], help="ranks, as in 4,8")
    parser.add_argument("--microbatches", type=counts(), default=[16])
    parser.add_argument("--profile", type=among(PROFILES), default=["balanced"])
    parser.add_argument("--jitter", type=among(JITTERS), default=["J2"])
    parser.add_argument("--steps", type=count, default=7, help="timed steps of each system")
    parser.add_argument("--rows", type=count, default=2, help="samples of a microbatch, 64 B each")
    parser.add_argument("--systems", type=among(names), default=[], help=", ".join(names))
    parser.add_argument("--deepspeed", action="store_true", help="its 1F1B too, if installed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(given)
    if options.out is not None:
        run_rank(options)
        return 0
    skipped = skipped_of(options)
    rows = launch(options, given)
    if options.json:
        head = {"torch": torch.__version__, "date": date.today().isoformat()}
        print(json.dumps({**head, "rows": rows, **({"skipped": skipped} if skipped else {})}))
    else:
        show(rows)
        for row in skipped:
            print(f"skipped {row['system']}: {row['reason']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A step of four real ranks against the bound and against torch's Schedule1F1B, side by side.

    python benchmarks/pipeline.py            # starts its own ranks with torchrun
    python benchmarks/pipeline.py --json

Stages sleep 10 ms forward and 20 ms backward inside autograd. Both systems run the same modules on
the same batch in one launch, torch over gloo, ours over gloo or, where tensors are small, with
their headers, a step of one and a step of the other in turn, each between
barriers. The bound is what a pipeline without any overhead takes: (M + P - 1) (tF + tB). The last
table says where the rest of ours goes on rank 0, whose ideal is M (tF + tB) of computing and
(P - 1) (tF + tB) of waiting.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from sleeping import SleepingStage
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import rrfp_async

FORWARD_S, BACKWARD_S = 0.010, 0.020
WIDTH = 16
ROWS = {"with headers, 128 B": 2, "gloo, 128 KiB": 2048}
"""Samples of a microbatch: few enough to come with headers, and enough to be transferred."""
Step = Callable[[], Awaitable[None]]


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    return torch.nn.functional.mse_loss(output, target)


async def timed(step: Step) -> float:
    """Milliseconds between the barriers around a step."""
    dist.barrier()
    begun = time.perf_counter()
    await step()
    dist.barrier()
    return 1e3 * (time.perf_counter() - begun)


def torch_step(
    module: torch.nn.Module, world: rrfp_async.World, microbatches: int, rows: int
) -> Step:
    """A step of torch's own 1F1B."""
    ranks = world.topology.world_size
    part = torch.zeros(rows, WIDTH)
    stage = PipelineStage(module, world.rank, ranks, torch.device("cpu"), input_args=(part,))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_fn)
    batch = torch.zeros(rows * microbatches, WIDTH)

    async def step() -> None:
        if world.rank == 0:
            schedule.step(batch)
        elif world.rank == ranks - 1:
            schedule.step(target=batch)
        else:
            schedule.step()

    return step


async def measure(
    world: rrfp_async.World, microbatches: int, steps: int, rows: int
) -> tuple[dict[str, list[float]], list[rrfp_async.StepResult]]:
    """Milliseconds of every step of both systems, and our results; the first of each left out."""
    module = SleepingStage(WIDTH, FORWARD_S, BACKWARD_S)
    batch = torch.zeros(rows * microbatches, WIDTH)
    config = rrfp_async.Config(microbatches=microbatches)
    times: dict[str, list[float]] = {"rrfp_async bf": [], "torch 1F1B": []}
    results = []
    async with rrfp_async.Runtime(module, world=world, config=config, loss_fn=loss_fn) as runtime:

        async def ours() -> None:
            results.append(await runtime.train_step(batch, target=batch))

        theirs = torch_step(module, world, microbatches, rows)
        for _ in range(steps + 1):
            times["rrfp_async bf"].append(await timed(ours))
            times["torch 1F1B"].append(await timed(theirs))
    return {system: samples[1:] for system, samples in times.items()}, results[1:]


def rest(results: list[rrfp_async.StepResult], ranks: int, microbatches: int) -> dict[str, float]:
    """Milliseconds per critical-path task that our steps took on this rank beyond the ideal."""
    unit_s = FORWARD_S + BACKWARD_S
    path_tasks = 2 * (microbatches + ranks - 1)
    beyond = {
        "computing longer than the sleeps": [r.compute_s - microbatches * unit_s for r in results],
        "waiting for arrivals": [r.blocking_s - (ranks - 1) * unit_s for r in results],
        "agreeing on the step": [r.coordination_s for r in results],
        "dispatching and thread hand-offs": [r.other_s for r in results],
    }
    return {what: 1e3 * statistics.median(spent) / path_tasks for what, spent in beyond.items()}


def summary(times: dict[str, list[float]], ranks: int, microbatches: int) -> dict[str, Any]:
    """Medians, and ratios to the bound and to torch."""
    path_tasks = 2 * (microbatches + ranks - 1)
    bound = 1e3 * (microbatches + ranks - 1) * (FORWARD_S + BACKWARD_S)
    torch_median = statistics.median(times["torch 1F1B"])
    rows = []
    for system, samples in times.items():
        median = statistics.median(samples)
        rows.append(
            {
                "system": system,
                "step_ms": median,
                "ratio_to_bound": median / bound,
                "ratio_to_torch": median / torch_median,
                "overhead_ms_per_task": (median - bound) / path_tasks,
            }
        )
    head = {"ranks": ranks, "microbatches": microbatches, "bound_ms": bound}
    return {**head, "torch": torch.__version__, "date": date.today().isoformat(), "rows": rows}


def show(result: dict[str, Any]) -> None:
    """The rows as a table."""
    size = f"P={result['ranks']}, M={result['microbatches']}, {result['tensors']}"
    table = Table(title=f"{size}: bound {result['bound_ms']:.0f} ms")
    for name in ("system", "step, ms", "/ bound", "/ torch", "ms above bound per task"):
        table.add_column(name)
    for row in result["rows"]:
        numbers = list(row.values())[1:]
        table.add_row(row["system"], *(f"{number:.3f}" for number in numbers))
    Console().print(table)
    table = Table("where ours goes, rank 0", "ms per task")
    for what, spent_ms in result["rest_ms_per_task"].items():
        table.add_row(what, f"{spent_ms:.3f}")
    Console().print(table)


def run_rank(options: argparse.Namespace) -> None:
    """Be one rank of the launch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = rrfp_async.torchrun_world()
    ranks, found = world.topology.world_size, []
    for tensors, rows in ROWS.items():
        times, results = rrfp_async.run(measure(world, options.microbatches, options.steps, rows))
        result = summary(times, ranks, options.microbatches)
        left = rest(results, ranks, options.microbatches)
        found.append({"tensors": tensors, **result, "rest_ms_per_task": left})
    world.close()
    if world.rank == 0 and options.json:
        print(json.dumps({"runs": found}))
    elif world.rank == 0:
        for result in found:
            show(result)
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        run_rank(options)
        return 0
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    command = [*launcher, "--nproc-per-node", str(options.ranks), *sys.argv]
    return subprocess.call(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    sys.exit(main())

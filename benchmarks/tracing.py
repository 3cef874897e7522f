"""What the log costs: steps with and without one in turn, and what is left where there is none.

    python -m benchmarks.tracing             # starts its own ranks with torchrun
    python -m benchmarks.tracing --json      # one JSON object

Every rank has two Runtimes on one world, one with `trace_dir`, and runs a few steps of one and as
many of the other in turn, each block between barriers. (Records are written up to 0.25 s later: in
single steps by turns one kind would pay for the other.) Stages sleep 1 ms a task, so every
dispatch, hand-off and arrival counts. `on / off` is the median over the pairs of blocks.
`disabled`: all that a task calls of a recorder that keeps nothing, in microseconds. `metrics`: the
same of what `Runtime.metrics()` tells.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
import timeit
from contextlib import AsyncExitStack
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import rrfp_async
from benchmarks.emulation import Emulated, SleepingLayer, batch_of
from benchmarks.launching import start
from benchmarks.options import count
from rrfp_async.arbiter import Decision, Reason
from rrfp_async.ids import Edge, TaskId
from rrfp_async.metrics import Meter
from rrfp_async.trace.recorder import Recorder
from rrfp_async.trace.records import Direction

TASK_S = 0.001
WIDTH, ROWS = 16, 2
CALLS = 200_000


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    return torch.nn.functional.mse_loss(output, target)


def disabled_us() -> float:
    """Microseconds that a task's calls take where nothing is kept: idle, dispatch, run, arrive."""
    recorder, task, edge = Recorder(), TaskId.parse("1F7"), Edge(0, 1)
    decision = Decision(task, None, 1, (), Reason.FIRST)

    def call() -> None:
        recorder.idles(decision, 1.0)
        recorder.idle_until(2.0)
        recorder.dispatched(decision, 1.0)
        recorder.ran(task, 1.0, 2.0)
        recorder.transferred(task, edge, Direction.SEND, 2, (), begun_s=1.0)
        recorder.transferred(task, edge, Direction.RECEIVE, 0, (), begun_s=1.0)

    return 1e6 * min(timeit.repeat(call, number=CALLS, repeat=5)) / CALLS


def metrics_us() -> float:
    """Microseconds that a task's counting takes: idle, run, a tensor received, a tensor sent."""
    meter, task, tensors = Meter(), TaskId.parse("1F7"), [torch.zeros(ROWS, WIDTH)]

    def call() -> None:
        meter.idle.observe(0.0021)
        meter.tasks[task.kind].observe(0.0021)
        meter.received.count(tensors)
        meter.sent.count(tensors)

    return 1e6 * min(timeit.repeat(call, number=CALLS, repeat=5)) / CALLS


async def pairs_ms(
    world: rrfp_async.World, options: argparse.Namespace, folder: str
) -> list[tuple[float, float]]:
    """Milliseconds of a step with the log and of one beside it without; the first left out."""
    microbatches = options.microbatches
    emulated = Emulated(world.rank, lambda kind, _: TASK_S if kind == "F" else TASK_S / 2)
    module = SleepingLayer(WIDTH, emulated, seed=0)
    batch = batch_of(microbatches, ROWS, WIDTH)
    pairs = []
    async with AsyncExitStack() as resources:
        runtimes = []
        for trace_dir in (folder, None):
            config = rrfp_async.Config(microbatches=microbatches, hint="bf", trace_dir=trace_dir)
            runtime = rrfp_async.Runtime(module, world=world, config=config, loss_fn=loss_fn)
            runtimes.append(await resources.enter_async_context(runtime))
        for number in range(math.ceil(options.steps / options.block) + 1):
            took = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):  # neither is always the first
                emulated.spans.clear()
                dist.barrier()
                begun = time.perf_counter()
                for _ in range(options.block):
                    await runtimes[which].train_step(batch, target=batch)
                dist.barrier()
                took[which] = 1e3 * (time.perf_counter() - begun) / options.block
            pairs.append((took[0], took[1]))
    return pairs[1:]


def lines_per_task(folder: str, microbatches: int) -> float:
    """How many lines rank 0 wrote for each task."""
    lines = (Path(folder) / "rank0.jsonl").read_text().splitlines()
    steps = sum('"step_end"' in line for line in lines)
    return len(lines) / (2 * microbatches * steps)


def summary(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Medians of both, and of the ratios."""
    on, off = zip(*pairs, strict=True)
    ratios = sorted(one / other for one, other in pairs)
    return {
        "on_ms": statistics.median(on),
        "off_ms": statistics.median(off),
        "on_over_off": statistics.median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "pairs": len(pairs),
    }


def show(result: dict[str, Any]) -> None:
    """The numbers as a table."""
    title = f"P={result['ranks']}, M={result['microbatches']}, tasks of {1e3 * TASK_S:g} ms"
    table = Table("off, ms", "on, ms", "on / off", "quartiles", "lines a task", title=title)
    low, high = result["quartiles"]
    numbers = [f"{result[name]:.2f}" for name in ("off_ms", "on_ms")]
    ratio, spread = f"{result['on_over_off']:.4f}", f"{low:.3f} to {high:.3f}"
    table.add_row(*numbers, ratio, spread, f"{result['lines_per_task']:.1f}")
    console = Console()
    console.print(table)
    console.print(f"disabled: {result['disabled_us']:.2f} µs a task")
    console.print(f"metrics: {result['metrics_us']:.2f} µs a task")


def run_rank(options: argparse.Namespace) -> None:
    """Be one rank of the launch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = rrfp_async.torchrun_world()
    with tempfile.TemporaryDirectory() as folder:
        pairs = rrfp_async.run(pairs_ms(world, options, folder))
        dist.barrier()
        if world.rank == 0:
            result = {
                "ranks": world.topology.world_size,
                "microbatches": options.microbatches,
                **summary(pairs),
                "lines_per_task": lines_per_task(folder, options.microbatches),
                "disabled_us": disabled_us(),
                "metrics_us": metrics_us(),
                "torch": torch.__version__,
                "date": date.today().isoformat(),
            }
            print(json.dumps(result)) if options.json else show(result)
    world.close()
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=count, default=4)
    parser.add_argument("--microbatches", type=count, default=16)
    parser.add_argument("--steps", type=count, default=200)
    parser.add_argument("--block", type=count, default=5, help="steps of one kind in a row")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if dist.is_torchelastic_launched():
        run_rank(options)
        return 0
    return start("tracing", *sys.argv[1:], ranks=options.ranks)


if __name__ == "__main__":
    sys.exit(main())

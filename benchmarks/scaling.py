"""What the runtime costs per task and per message as microbatches and ranks grow.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --real 2,4,8,16 --microbatches 16,64,256,1024 --virtual 64,512,4096

Real ranks: processes that torchrun starts, a stage of one small layer on each, which takes no time,
so CPU time is the runtime's and the layer's. Virtual ranks: the same dispatchers in one process on
a virtual clock. A task is an F, I or W; a message a header, with its tensor. CPU time is that of
the whole process, all threads; memory the peak resident size, without what an idle process with
the same modules loaded takes.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import rrfp_async
from benchmarks.emulation import Emulated, SleepingLayer, batch_of
from benchmarks.launching import rows_from
from benchmarks.options import counts
from benchmarks.peers import SEED, WIDTH, loss_fn
from rrfp_async.config import Config
from rrfp_async.sim.cluster import VirtualCluster
from rrfp_async.sim.costs import draw_costs

ROWS, VIRTUAL_MICROBATCHES = 2, 16
STEPS = 5
KINDS = 3


def row_of(
    world: str, ranks: int, microbatches: int, cpu_s: float, memory_bytes: float
) -> dict[str, Any]:
    """A row; `cpu_s` and `memory_bytes` are of all ranks together."""
    tasks = KINDS * ranks * microbatches
    messages = 2 * (ranks - 1) * microbatches
    return {
        "world": world,
        "ranks": ranks,
        "microbatches": microbatches,
        "cpu_us_per_task": 1e6 * cpu_s / tasks,
        "cpu_us_per_message": 1e6 * cpu_s / messages,
        "memory_mib_per_rank": memory_bytes / ranks / 2**20,
    }


# -- real ranks ----------------------------------------------------------------------------------


async def measure_rank(microbatches: int) -> tuple[float, int]:
    """The median CPU seconds of a step on this rank, and the bytes that the steps took."""
    before = resident_bytes()
    async with rrfp_async.torchrun_world() as world:
        layer = SleepingLayer(WIDTH, Emulated(world.rank, lambda _kind, _microbatch: 0.0), SEED)
        config = rrfp_async.Config(microbatches=microbatches, return_outputs=False)
        batch = batch_of(microbatches, ROWS, WIDTH)
        samples = []
        async with rrfp_async.Runtime(
            layer, world=world, config=config, loss_fn=loss_fn
        ) as runtime:
            for _ in range(STEPS + 1):
                layer.emulated.spans.clear()
                begun_s = time.process_time()
                await runtime.train_step(batch, target=batch)
                samples.append(time.process_time() - begun_s)
    return statistics.median(samples[1:]), resident_bytes() - before


def run_rank(options: argparse.Namespace) -> None:
    """Be one of the real ranks; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows, first = [], dist.get_rank() == 0
    for microbatches in options.microbatches:
        told: list[Any] = [None] * dist.get_world_size()
        mine = rrfp_async.run(measure_rank(microbatches))
        dist.gather_object(mine, told if first else None)
        if first:
            cpu_s, memory = (sum(column) for column in zip(*told, strict=True))
            rows.append(row_of("real", len(told), microbatches, cpu_s, memory))
    if first:
        options.out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


# -- virtual ranks -------------------------------------------------------------------------------


def run_virtual(options: argparse.Namespace) -> None:
    """Simulate a step of that many ranks, in a process of its own for the memory's sake."""
    [ranks] = options.virtual
    before = resident_bytes()
    costs = draw_costs(
        stages=ranks,
        microbatches=VIRTUAL_MICROBATCHES,
        profile="llm",
        jitter="J2",
        delay_s=0.001,
        seed=0,
    )
    cluster = VirtualCluster(costs, Config(microbatches=VIRTUAL_MICROBATCHES))
    begun_s = time.process_time()
    cluster.run_step()
    cpu_s = time.process_time() - begun_s
    memory = resident_bytes() - before
    options.out.write_text(
        json.dumps([row_of("virtual", ranks, VIRTUAL_MICROBATCHES, cpu_s, memory)])
    )


def resident_bytes() -> int:
    """The most that this process has had in memory so far."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib * 1024


# -- the launch ----------------------------------------------------------------------------------


def launch(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every size in processes of its own."""
    rows: list[dict[str, Any]] = []
    microbatches = ",".join(map(str, options.microbatches))
    for ranks in options.real:
        rows += rows_from("scaling", "--microbatches", microbatches, ranks=ranks)
    for ranks in options.virtual:
        rows += rows_from("scaling", "--virtual", str(ranks))
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The rows as a table."""
    table = Table()
    for name in ("world", "ranks", "microbatches", "CPU us / task", "/ message", "MiB / rank"):
        table.add_column(name)
    for row in rows:
        *words, task, message, memory = row.values()
        table.add_row(*map(str, words), f"{task:.0f}", f"{message:.0f}", f"{memory:.2f}")
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the processes, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", type=counts(2), default=[2, 4, 8, 16], help="as in 2,4")
    parser.add_argument("--microbatches", type=counts(2), default=[16, 64, 256, 1024])
    parser.add_argument("--virtual", type=counts(2), default=[64, 512, 4096])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.out is not None:
        (run_rank if dist.is_torchelastic_launched() else run_virtual)(options)
        return 0
    rows = launch(options)
    if options.json:
        print(json.dumps({"date": date.today().isoformat(), "rows": rows}))
    else:
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What agreeing on every task costs ranks that compute a stage together: leader and all-gather.

    python -m benchmarks.tp_agreement                      # PP4 x TP2, then PP2 x TP4
    python -m benchmarks.tp_agreement --grids 4x2 --jitter J3 --json

Starts its own ranks with torchrun, one process a rank. Stages sleep inside autograd, 10 ms for F
and 20 ms for B, plus the paper's jitter, drawn for each rank, step and task; each F and B then
enters a real all-reduce of its group, so a rank that is delayed delays its group as it would on
GPUs. Both protocols take turns, a step of one and a step of the other, on the same delays.

`wait_share` is the time that a rank could have run a task and had not begun it: from when all that
the task needs was there on every rank of the group and this rank's device was free, to its start;
summed over all ranks and steps, over their number times the step. Everything between is in it, the
hand-off to the compute thread too. `retries` are per rank and step.
"""

import argparse
import gc
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
from torch import nn

import rrfp_async
from benchmarks.emulation import Emulated, SleepingLayer, batch_of
from benchmarks.launching import rows_from
from benchmarks.options import among, count
from rrfp_async.config import TP_PROTOCOLS
from rrfp_async.sim.costs import JITTERS, Costs, Profile, draw_costs

TASK_S = 0.010
WIDTH, ROWS, SEED = 16, 2, 7


class _Together(torch.autograd.Function):
    """The mean over the ranks of a group, of what goes forward and of what comes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _mean(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _mean(gradients[0], ctx.group), None


def _mean(x: torch.Tensor, group: Any) -> torch.Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


class SharedStage(nn.Module):
    """A sleeping layer whose forwards and backwards meet those of the other ranks of its group.

    Equal on all of them, so that the mean is what each has made; column 0 stays the microbatch's
    number.
    """

    def __init__(self, emulated: Emulated, group: Any) -> None:
        super().__init__()
        self.layer = SleepingLayer(WIDTH, emulated, SEED)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(batch, 16)` in, the same out."""
        y: torch.Tensor = _Together.apply(self.layer(x), self.group)
        return y


@dataclass
class Samples:
    """What the steps under one protocol came to, on one rank."""

    step_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    retries: list[int] = field(default_factory=list)


def costs_of(options: argparse.Namespace, pp: int, tp_rank: int, step: int) -> Costs:
    """What the tasks take in a step, on the ranks of one column."""
    return draw_costs(
        stages=pp,
        microbatches=options.microbatches,
        profile=Profile(),
        jitter=options.jitter,
        delay_s=0.0,
        seed=1000 * step + tp_rank,
        task_s=TASK_S,
    )


def set_durations(emulated: Emulated, costs: Costs) -> None:
    """Let the stage take what the table says, its backward both halves of it."""
    tables = {"F": costs.forward_s, "I": costs.backward_input_s, "W": costs.weight_s}
    emulated.duration = lambda kind, microbatch: tables[kind][emulated.stage][microbatch]


async def measure(world: rrfp_async.World, options: argparse.Namespace) -> dict[str, Samples]:
    """Steps of both protocols by turns."""
    place, pp = world.place, world.topology.pp
    emulated = Emulated(place.pp, lambda _kind, _microbatch: 0.0)
    stage = SharedStage(emulated, world.mesh.get_group("tp"))
    batch = batch_of(options.microbatches, ROWS, WIDTH)
    samples = {protocol: Samples() for protocol in TP_PROTOCOLS}
    async with AsyncExitStack() as resources:
        runtimes = {}
        for protocol in TP_PROTOCOLS:
            config = rrfp_async.Config(
                microbatches=options.microbatches, hint=options.hint, tp_protocol=protocol
            )
            runtime = rrfp_async.Runtime(
                stage, world=world, config=config, loss_fn=nn.functional.mse_loss
            )
            runtimes[protocol] = await resources.enter_async_context(runtime)
            await runtime.train_step(batch, target=batch)
        for step in range(options.steps):
            set_durations(emulated, costs_of(options, pp, place.tp, step))
            for protocol in TP_PROTOCOLS if step % 2 else reversed(TP_PROTOCOLS):
                gc.collect()
                dist.barrier()
                begun_s = time.perf_counter()
                result = await runtimes[protocol].train_step(batch, target=batch)
                told = samples[protocol]
                told.step_s.append(time.perf_counter() - begun_s)
                assert result.agreement is not None
                told.wait_s.append(result.agreement.wait_s)
                told.retries.append(result.agreement.retries)
                emulated.spans.clear()
    return samples


def row_of(
    protocol: str, topology: rrfp_async.Topology, ranks: Sequence[Samples]
) -> dict[str, Any]:
    """One protocol's row from what all ranks tell."""
    step_s = [max(times) for times in zip(*(each.step_s for each in ranks), strict=True)]
    waited_s = sum(sum(each.wait_s) for each in ranks)
    retries = sum(sum(each.retries) for each in ranks)
    return {
        "protocol": protocol,
        "pp": topology.pp,
        "tp": topology.tp,
        "step_ms": 1e3 * statistics.median(step_s),
        "wait_share": waited_s / (len(ranks) * sum(step_s)),
        "retries": retries / (len(ranks) * len(step_s)),
    }


def run_rank(options: argparse.Namespace) -> None:
    """Be one rank of a launch; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (pp, tp) = options.grids[0]
    topology = rrfp_async.Topology(pp, tp=tp)
    world = rrfp_async.torchrun_world(topology)
    samples = rrfp_async.run(lambda: measure(world, options))
    gathered: list[Any] = [None] * topology.world_size
    dist.all_gather_object(gathered, samples)
    if world.rank == 0:
        rows = [row_of(name, topology, [rank[name] for rank in gathered]) for name in TP_PROTOCOLS]
        options.out.write_text(json.dumps(rows))
    world.close()
    dist.destroy_process_group()


def launch(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the ranks of every grid, one grid after another; their rows."""
    rows: list[dict[str, Any]] = []
    for pp, tp in options.grids:
        arguments = ["--grids", f"{pp}x{tp}", "--jitter", options.jitter, "--hint", options.hint]
        arguments += ["--microbatches", str(options.microbatches), "--steps", str(options.steps)]
        rows += rows_from("tp_agreement", *arguments, ranks=pp * tp)
    return rows


def grids(words: str) -> list[tuple[int, int]]:
    """Pipeline ranks and ranks a stage, as in 4x2,2x4."""
    found = []
    for word in words.split(","):
        pp, _, tp = word.partition("x")
        if not (pp.isdecimal() and tp.isdecimal() and int(pp) >= 1 and int(tp) >= 2):
            raise argparse.ArgumentTypeError(
                f"{word!r}: give pipeline ranks and at least 2 ranks a stage, as in 4x2,2x4"
            )
        found.append((int(pp), int(tp)))
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The rows as a table."""
    table = Table("grid", "protocol", "step, ms", "wait share", "retries a step")
    for row in rows:
        numbers = (f"{row['step_ms']:.1f}", f"{row['wait_share']:.2%}", f"{row['retries']:.2f}")
        table.add_row(f"PP{row['pp']} x TP{row['tp']}", row["protocol"], *numbers)
    Console(width=80).print(table)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grids", type=grids, default=[(4, 2), (2, 4)], help="as in 4x2,2x4")
    parser.add_argument("--microbatches", type=count, default=16)
    parser.add_argument("--jitter", type=lambda word: among(JITTERS)(word)[0], default="J2")
    parser.add_argument("--hint", default="bf")
    parser.add_argument("--steps", type=count, default=9, help="timed steps of each protocol")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.out is not None:
        run_rank(options)
        return 0
    rows = launch(options)
    if options.json:
        head = {"torch": torch.__version__, "date": date.today().isoformat()}
        print(json.dumps({**head, "rows": rows}))
    else:
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

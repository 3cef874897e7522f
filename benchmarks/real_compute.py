"""A small GPT on real text: our engine beside torch's Schedule1F1B, step by step in one launch.

    python -m benchmarks.real_compute
    python -m benchmarks.real_compute --ranks 2 --steps 30 --json

The model, batches, optimizer and torch engine are those of examples/train_gpt.py. Nothing sleeps:
the ranks compute, one thread each, so more ranks than cores would measure the machine.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import rrfp_async
from benchmarks.launching import start
from benchmarks.options import count

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))  # they are scripts

from gpt import build_layers, loss_fn, stage_of
from text import load_text, sample
from torch_engine import TorchEngine
from train_gpt import MODEL, make_optimizer

MICROBATCHES, BATCH, SEED = 8, 16, 0
OURS = ("auto", "bf")


async def measure(steps: int) -> dict[str, list[float]]:
    """Seconds of every step of every engine, in turn; the first two of each left out."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = load_text(None)
    times: dict[str, list[float]] = {
        "torch 1F1B": [],
        **{f"rrfp_async {hint}": [] for hint in OURS},
    }

    def stage() -> torch.nn.Module:
        return stage_of(build_layers(MODEL, SEED), rank, ranks)

    engine = TorchEngine(
        stage(), microbatches=MICROBATCHES, loss_fn=loss_fn, make_optimizer=make_optimizer
    )
    runtimes = {}
    async with rrfp_async.torchrun_world() as world:
        for hint in OURS:
            config = rrfp_async.Config(microbatches=MICROBATCHES, hint=hint, return_outputs=False)
            runtimes[f"rrfp_async {hint}"] = await rrfp_async.Runtime(
                stage(), world=world, config=config, loss_fn=loss_fn, optimizer=make_optimizer
            ).__aenter__()
        for step in range(steps + 2):
            inputs, targets = sample(text, seed=SEED, step=step, batch=BATCH, context=MODEL.context)
            for name, of_engine in times.items():
                dist.barrier()
                begun_s = time.perf_counter()
                if name in runtimes:
                    await runtimes[name].train_step(inputs, target=targets)
                else:
                    engine.step(inputs, targets)
                dist.barrier()
                of_engine.append(time.perf_counter() - begun_s)
        for runtime in runtimes.values():
            await runtime.close()
    return {name: of_engine[2:] for name, of_engine in times.items()}


def run_rank(options: argparse.Namespace) -> None:
    """Be one rank; the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    times = rrfp_async.run(measure(options.steps))
    if dist.get_rank() == 0:
        torch_s = times["torch 1F1B"]
        rows = [
            {
                "engine": name,
                "step_ms": 1e3 * statistics.median(of_engine),
                "ratio_to_torch": statistics.median(of_engine) / statistics.median(torch_s),
            }
            for name, of_engine in times.items()
        ]
        head = {"ranks": options.ranks, "torch": torch.__version__}
        if options.json:
            print(json.dumps({**head, "date": date.today().isoformat(), "rows": rows}))
        else:
            table = Table(
                "engine", "step, ms", "/ torch", title=f"{options.ranks} ranks, real text"
            )
            for row in rows:
                table.add_row(
                    row["engine"], f"{row['step_ms']:.1f}", f"{row['ratio_to_torch']:.3f}"
                )
            Console().print(table)
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--steps", type=count, default=30)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(given)
    if dist.is_torchelastic_launched():
        run_rank(options)
        return 0
    return start("real_compute", *given, ranks=options.ranks)


if __name__ == "__main__":
    sys.exit(main())

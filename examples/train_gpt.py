"""Train a byte-level GPT on real text over pipeline ranks, or unpartitioned with --reference.

    torchrun --nproc-per-node 4 examples/train_gpt.py --steps 30     # a process per rank
    python examples/train_gpt.py --ranks 4 --steps 30                # all ranks in one process
    python examples/train_gpt.py --reference --steps 30
    torchrun --nproc-per-node 8 examples/train_gpt.py --tp 2 --dp 2  # pp = 8 / (2 * 2) = 2
    torchrun --nproc-per-node 2 examples/train_gpt.py --engine torch # torch's 1F1B, to compare

With --json all print the same losses and the same hash over all gradients, whatever the dispatch
order was: try another --hint, and --delay-seed to shake the order up. With --dp and --tp sums are
taken in another order than the reference's: the hashes then are equal for all replicas and runs.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from gpt import GPTConfig, build_layers, loss_fn, stage_of
from gpt_tensor_parallel import parallelize
from optimizer import make_optimizer
from torch_engine import TorchEngine
from training import (
    History,
    OnStep,
    Recipe,
    batch_of,
    parse_with,
    parser_of,
    positive,
    run_example,
    under_torchrun,
    way_of,
)

MODEL = GPTConfig()


class GPT(Recipe):
    """The GPT of gpt.py: a list of layers, cut evenly."""

    context = MODEL.context

    def whole(self, seed: int) -> torch.nn.Module:
        """All layers as one stage."""
        return self.stage(seed, 0, 1)

    def predict(self, whole: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for the next byte."""
        logits: torch.Tensor = whole(tokens)
        return logits

    def stage(self, seed: int, index: int, stages: int) -> torch.nn.Module:
        """A run of the layers."""
        return stage_of(build_layers(MODEL, seed), index, stages)

    def parallelize(self, stage: torch.nn.Module, mesh: Any) -> torch.nn.Module:
        """Attention by heads, the feed-forward layer by channels."""
        return parallelize(stage, mesh)


def train_torch(
    recipe: Recipe, options: argparse.Namespace, text: torch.Tensor, on_step: OnStep
) -> History:
    """Train as the one rank that torchrun started here, with torch's own 1F1B."""
    rank = int(os.environ.get("RANK", "0"))
    engine = TorchEngine(
        recipe.stage(options.seed, rank, options.ranks),
        microbatches=options.microbatches,
        loss_fn=loss_fn,
        make_optimizer=make_optimizer,
    )
    history = History()
    for step in range(options.steps):
        tokens, targets = batch_of(recipe, options, text, step)
        begun = time.perf_counter()
        loss = engine.loss_for_all(engine.step(tokens, targets))
        history.step_s.append(time.perf_counter() - begun)
        history.losses.append(loss)
        if rank == 0:
            on_step(step, loss)
    engine.close()
    return history


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument(
        "--engine",
        choices=["rrfp_async", "torch"],
        default="rrfp_async",
        help="torch: torch.distributed.pipelining's 1F1B, under torchrun, for comparison",
    )
    parser.add_argument("--tp", type=positive, default=1, help="ranks that share a stage")
    options = parse_with(parser, arguments)
    if options.engine == "torch":
        _check_torch(parser, options)
    return options


def _check_torch(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what torch's 1F1B does not do here."""
    if not under_torchrun():
        parser.error("--engine torch needs a process for every rank: start with torchrun")
    several = options.tp * options.dp * options.chunks > 1
    if options.reference or several or options.device != "cpu":
        parser.error("--engine torch runs one stage a rank on CPUs: leave the other options out")
    if options.batch % options.microbatches:
        parser.error(f"--batch {options.batch} must be a multiple of {options.microbatches}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse(arguments)
    way = train_torch if options.engine == "torch" else way_of(options)
    return run_example(GPT(), options, way)


if __name__ == "__main__":
    sys.exit(main())

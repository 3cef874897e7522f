"""Train a byte-level GPT on real text over pipeline ranks, or unpartitioned with --reference.

    torchrun --nproc-per-node 4 examples/train_gpt.py --steps 30     # a process per rank
    python examples/train_gpt.py --ranks 4 --steps 30                # all ranks in one process
    python examples/train_gpt.py --reference --steps 30
    torchrun --nproc-per-node 2 examples/train_gpt.py --engine torch # torch's 1F1B, to compare

With --json all print the same losses and the same hash over all gradients, whatever the dispatch
order was: try another --hint, and --delay-seed to shake the order up.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from digest import combined_digest, gradient_digests
from gpt import GPTConfig, build_layers, loss_fn, stage_of
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from text import load_text, sample
from torch_engine import TorchEngine

import rrfp_async
from rrfp_async.hints import FILES, HINTS

MODEL = GPTConfig()
LEARNING_RATE = 2e-3

OnStep = Callable[[int, float], None]


@dataclass
class History:
    """What one rank has to tell: loss and seconds of each step, hashes of its gradients."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)


def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The same optimizer for the whole model and for a stage."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


async def train_rank(
    world: rrfp_async.World, options: argparse.Namespace, text: torch.Tensor, on_step: OnStep
) -> History:
    """Train this rank's stages of the model."""
    if options.delay_seed is not None:
        world = rrfp_async.with_delays(world, rrfp_async.Delays(options.delay_seed))
    topology = world.topology
    device = world.device.torch_device
    layers = build_layers(MODEL, options.seed)
    stages = [
        stage_of(layers, stage, topology.num_stages).to(device)
        for stage in topology.stages_of(world.rank)
    ]
    config = rrfp_async.Config(
        microbatches=options.microbatches,
        hint=options.hint,
        binding=options.binding,
        limit=options.limit,
        return_outputs=False,
        trace_dir=options.trace_dir,
    )
    history = History()
    async with rrfp_async.Runtime(
        stages, world=world, config=config, loss_fn=loss_fn, optimizer=make_optimizer
    ) as runtime:
        for step in range(options.steps):
            inputs, targets = sample(
                text, seed=options.seed, step=step, batch=options.batch, context=MODEL.context
            )
            result = await runtime.train_step(inputs.to(device), target=targets.to(device))
            history.losses.append(result.loss)
            history.step_s.append(result.step_s)
            if world.rank == 0:
                on_step(step, result.loss)
    for stage in stages:
        history.digests |= gradient_digests(stage)
    return history


def topology_of(options: argparse.Namespace) -> rrfp_async.Topology:
    """The pipeline of the command line."""
    return rrfp_async.Topology(options.ranks, chunks=options.chunks, placement=options.placement)


def train_pipeline(options: argparse.Namespace, text: torch.Tensor, on_step: OnStep) -> History:
    """Train on all ranks in this process; the first rank's history with everyone's hashes."""

    async def main() -> list[History]:
        return await rrfp_async.run_local(
            options.ranks,
            lambda world: train_rank(world, options, text, on_step),
            topology=topology_of(options),
            device=options.device,
        )

    histories = rrfp_async.run(main)
    for history in histories[1:]:
        histories[0].digests |= history.digests
    return histories[0]


def train_process(options: argparse.Namespace, text: torch.Tensor, on_step: OnStep) -> History:
    """Train as the one rank that torchrun started here; rank 0 collects everyone's hashes."""
    world = rrfp_async.torchrun_world(topology_of(options), device=options.device)

    async def main() -> History:
        async with world:
            return await train_rank(world, options, text, on_step)

    history = rrfp_async.run(main)
    world.store.set(f"digests/{world.rank}", json.dumps(history.digests))
    if world.rank == 0:
        for rank in range(1, world.topology.world_size):
            history.digests |= json.loads(world.store.get(f"digests/{rank}"))
    return history


def train_torch(options: argparse.Namespace, text: torch.Tensor, on_step: OnStep) -> History:
    """Train as the one rank that torchrun started here, with torch's own 1F1B."""
    rank = int(os.environ.get("RANK", "0"))
    layers = build_layers(MODEL, options.seed)
    engine = TorchEngine(
        stage_of(layers, rank, options.ranks),
        microbatches=options.microbatches,
        loss_fn=loss_fn,
        make_optimizer=make_optimizer,
    )
    history = History()
    for step in range(options.steps):
        inputs, targets = sample(
            text, seed=options.seed, step=step, batch=options.batch, context=MODEL.context
        )
        begun = time.perf_counter()
        loss = engine.loss_for_all(engine.step(inputs, targets))
        history.step_s.append(time.perf_counter() - begun)
        history.losses.append(loss)
        if rank == 0:
            on_step(step, loss)
    engine.close()
    return history


def train_reference(options: argparse.Namespace, text: torch.Tensor, on_step: OnStep) -> History:
    """Train the unpartitioned model: same seed, batches and microbatches, plain torch."""
    model = stage_of(build_layers(MODEL, options.seed), 0, 1).to(options.device)
    optimizer = make_optimizer(list(model.parameters()))
    history = History()
    for step in range(options.steps):
        begun = time.perf_counter()
        inputs, targets = sample(
            text, seed=options.seed, step=step, batch=options.batch, context=MODEL.context
        )
        optimizer.zero_grad()
        loss_sum = 0.0
        parts = zip(
            inputs.to(options.device).tensor_split(options.microbatches),
            targets.to(options.device).tensor_split(options.microbatches),
            strict=True,
        )
        for part, target in parts:
            loss = loss_fn(model(part), target)
            weight = len(part) / len(inputs)
            (loss * weight).backward()
            loss_sum += loss.item() * weight
        optimizer.step()
        history.losses.append(loss_sum)
        history.step_s.append(time.perf_counter() - begun)
        on_step(step, loss_sum)
    history.digests = gradient_digests(model)
    return history


def report(options: argparse.Namespace, history: History) -> str:
    """The run as one JSON object."""
    names = [name for name, _ in stage_of(build_layers(MODEL, 0), 0, 1).named_parameters()]
    return json.dumps(
        {
            "losses": history.losses,
            "step_s": history.step_s,
            "ranks": options.ranks,
            "engine": options.engine,
            "hint": None if options.reference or options.engine == "torch" else options.hint,
            "grad_sha256": combined_digest(names, history.digests) if history.digests else None,
        }
    )


def train(options: argparse.Namespace) -> History:
    """Train with a progress bar on a terminal, and with lines elsewhere."""
    text = load_text(options.data)
    run = train_reference if options.reference else train_pipeline
    if options.engine == "torch":
        run = train_torch
    elif under_torchrun() and not options.reference:
        run = train_process
    console = Console(stderr=True)
    if not console.is_terminal or not is_first():

        def tell(step: int, loss: float) -> None:
            if step % 5 == 0 or step == options.steps - 1:
                print(f"step {step + 1:>3}/{options.steps}  loss {loss:.4f}", file=sys.stderr)

        return run(options, text, tell)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("loss", total=options.steps)

        def advance(_step: int, loss: float) -> None:
            progress.update(bar, advance=1, description=f"loss {loss:.4f}")

        return run(options, text, advance)


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first() -> bool:
    """Whether this process is the one that talks."""
    return os.environ.get("RANK", "0") == "0"


def positive(word: str) -> int:
    """An int of at least 1 from the command line."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} must be a whole number of at least 1")
    return int(word)


def limit(word: str) -> int | str:
    """`auto`, or an int of at least 1 from the command line."""
    return word if word == "auto" else positive(word)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=positive, help="pipeline ranks (default 4, or torchrun's)")
    parser.add_argument("--reference", action="store_true", help="train unpartitioned")
    parser.add_argument(
        "--engine",
        choices=["rrfp_async", "torch"],
        default="rrfp_async",
        help="torch: torch.distributed.pipelining's 1F1B, under torchrun, for comparison",
    )
    parser.add_argument("--steps", type=positive, default=30)
    parser.add_argument("--batch", type=positive, default=16, help="samples a step (default 16)")
    parser.add_argument("--microbatches", type=positive, default=8)
    parser.add_argument("--chunks", type=positive, default=1, help="stages per rank (default 1)")
    parser.add_argument("--placement", choices=["loop", "v"], default="loop", help="of the chunks")
    parser.add_argument("--hint", default="auto", help=f"{', '.join((*HINTS, *FILES))}")
    parser.add_argument(
        "--binding",
        action=argparse.BooleanOptionalAction,
        help="execute a listed hint as it stands (default: only a replay)",
    )
    parser.add_argument("--limit", type=limit, default="auto", help="forwards in flight, or auto")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the batches")
    parser.add_argument("--delay-seed", type=int, help="sleep at random before sends and tasks")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--data", type=Path, help="a file or folder of text (default: stdlib)")
    parser.add_argument("--trace-dir", type=Path, help="write each rank's dispatch log there")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args(arguments)
    started = int(os.environ["WORLD_SIZE"]) if under_torchrun() else None
    if started is not None and options.ranks not in (None, started):
        parser.error(f"--ranks {options.ranks}, but torchrun started {started}: leave it out")
    options.ranks = 1 if options.reference else options.ranks or started or 4
    if options.engine == "torch":
        _check_torch(parser, options)
    return options


def _check_torch(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what torch's 1F1B does not do here."""
    if not under_torchrun():
        parser.error("--engine torch needs a process for every rank: start with torchrun")
    if options.reference or options.chunks > 1 or options.device != "cpu":
        parser.error("--engine torch runs one stage a rank on CPUs: leave the other options out")
    if options.batch % options.microbatches:
        parser.error(f"--batch {options.batch} must be a multiple of {options.microbatches}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse(arguments)
    torch.set_num_threads(1)  # bits depend on it, and each rank computes on one thread
    try:
        history = train(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except rrfp_async.RrfpError as error:
        print(f"error on rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"rank {os.environ.get('RANK', '0')} interrupted", file=sys.stderr)
        return 130
    if not is_first():
        return 0
    first, last = history.losses[0], history.losses[-1]
    who = "the unpartitioned model" if options.reference else f"{options.ranks} pipeline ranks"
    print(f"{who}: loss {first:.4f} -> {last:.4f} in {options.steps} steps")
    if options.json:
        print(report(options, history))
    return 0


if __name__ == "__main__":
    sys.exit(main())

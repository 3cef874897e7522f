"""What the examples share: a command line, and training over pipeline ranks or unpartitioned.

An example brings a `Recipe`, its model and how that is fed. With --json every way of training
prints the same losses and the same hash over all gradients, whatever the dispatch order was. With
--dp and --tp sums are taken in another order than the unpartitioned model's: hashes then are equal
for all replicas and all runs.
"""

import argparse
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from digest import combined_digest, gradient_digests
from gpt import loss_fn
from optimizer import make_optimizer, make_zero1
from text import load_text, sample

import rrfp_async
from rrfp_async.hints import FILES, HINTS

OnStep = Callable[..., None]
"""Told the number and the loss of a step and, of a pipeline's, its result."""


@dataclass
class History:
    """What one rank has to tell: loss and seconds of each step, hashes of its gradients."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)

    def note_gradients(self, stage: torch.nn.Module, *, dp: int = 0, tp: int = 0) -> None:
        """Keep the hashes of a stage, as those of that replica and shard."""
        digests = gradient_digests(stage)
        self.digests |= {f"{dp} {tp} {name}": digest for name, digest in digests.items()}


class Recipe(ABC):
    """A model over bytes that can be cut into stages.

    Attributes:
        context: Bytes in a sample.
    """

    context: int

    @abstractmethod
    def whole(self, seed: int) -> torch.nn.Module:
        """The unpartitioned model; equal for equal seeds."""

    @abstractmethod
    def predict(self, whole: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `(batch, context, 256)` of `whole` for tokens `(batch, context)` int64."""

    @abstractmethod
    def stage(self, seed: int, index: int, stages: int) -> torch.nn.Module:
        """Stage `index` of `stages` of the same model, its parameters named as in the whole.

        Raises:
            ValueError: If the model does not make as many stages.
        """

    def parallelize(
        self,
        stage: torch.nn.Module,  # noqa: ARG002 - a default
        mesh: Any,
    ) -> torch.nn.Module:
        """Leave this rank its shard of `stage`, computed by all ranks of the `mesh` together.

        Raises:
            ValueError: If the model has no plan for that, or cannot be divided so.
        """
        raise ValueError(f"{type(self).__name__} has no plan for {mesh}: leave --tp out")

    def inputs(self, tokens: torch.Tensor) -> tuple[Any, ...]:
        """What the first stage is called with for tokens `(batch, context)`."""
        return (tokens,)

    def topology(self, options: argparse.Namespace) -> rrfp_async.Topology:
        """The pipeline of the command line."""
        return rrfp_async.Topology(options.ranks, **grid_of(options))


def grid_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a Topology of the command line is given beside the number of pipeline ranks."""
    grid = {"chunks": options.chunks, "placement": options.placement}
    return {**grid, "dp": options.dp, "tp": options.tp}


Train = Callable[[Recipe, argparse.Namespace, torch.Tensor, OnStep], History]


def batch_of(
    recipe: Recipe, options: argparse.Namespace, text: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of a step, on the device; the same on every rank."""
    pair = sample(text, seed=options.seed, step=step, batch=options.batch, context=recipe.context)
    return pair[0].to(options.device), pair[1].to(options.device)


async def train_rank(
    world: rrfp_async.World,
    recipe: Recipe,
    options: argparse.Namespace,
    text: torch.Tensor,
    on_step: OnStep,
) -> History:
    """Train this rank's stages of the model."""
    if options.delay_seed is not None:
        world = rrfp_async.with_delays(world, rrfp_async.Delays(options.delay_seed))
    topology = world.topology
    stages = [
        recipe.stage(options.seed, stage, topology.num_stages).to(world.device.torch_device)
        for stage in topology.stages_of(world.place.pp)
    ]
    if topology.tp > 1:
        stages = [recipe.parallelize(stage, world.mesh["tp"]) for stage in stages]
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
        stages,
        world=world,
        config=config,
        loss_fn=loss_fn,
        optimizer=make_zero1(world) if options.zero1 else make_optimizer,
    ) as runtime:
        for step in range(options.steps):
            batch = batch_of(recipe, options, text, step)
            tokens, targets = (t.tensor_split(topology.dp)[world.place.dp] for t in batch)
            result = await runtime.train_step(*recipe.inputs(tokens), target=targets)
            history.losses.append(result.loss)
            history.step_s.append(result.step_s)
            if world.rank == 0:
                on_step(step, result.loss, result)
    for stage in stages:
        history.note_gradients(stage, dp=world.place.dp, tp=world.place.tp)
    return history


def train_pipeline(
    recipe: Recipe, options: argparse.Namespace, text: torch.Tensor, on_step: OnStep
) -> History:
    """Train on all ranks in this process; the first rank's history with everyone's hashes."""
    topology = recipe.topology(options)

    async def main() -> list[History]:
        return await rrfp_async.run_local(
            topology.world_size,
            lambda world: train_rank(world, recipe, options, text, on_step),
            topology=topology,
            device=options.device,
        )

    histories = rrfp_async.run(main)
    for history in histories[1:]:
        histories[0].digests |= history.digests
    return histories[0]


def train_process(
    recipe: Recipe, options: argparse.Namespace, text: torch.Tensor, on_step: OnStep
) -> History:
    """Train as the one rank that torchrun started here; rank 0 collects everyone's hashes."""
    world = rrfp_async.torchrun_world(recipe.topology(options), device=options.device)

    async def main() -> History:
        async with world:
            return await train_rank(world, recipe, options, text, on_step)

    history = rrfp_async.run(main)
    world.store.set(f"digests/{world.rank}", json.dumps(history.digests))
    if world.rank == 0:
        for rank in range(1, world.topology.world_size):
            history.digests |= json.loads(world.store.get(f"digests/{rank}"))
    return history


def train_reference(
    recipe: Recipe, options: argparse.Namespace, text: torch.Tensor, on_step: OnStep
) -> History:
    """Train the unpartitioned model: same seed, batches and microbatches, plain torch."""
    model = recipe.whole(options.seed).to(options.device)
    optimizer = make_optimizer(list(model.parameters()))
    history = History()
    for step in range(options.steps):
        begun = time.perf_counter()
        tokens, targets = batch_of(recipe, options, text, step)
        optimizer.zero_grad()
        loss_sum = 0.0
        parts = zip(
            tokens.tensor_split(options.microbatches),
            targets.tensor_split(options.microbatches),
            strict=True,
        )
        for part, target in parts:
            loss = loss_fn(recipe.predict(model, part), target)
            weight = len(part) / len(tokens)
            (loss * weight).backward()
            loss_sum += loss.item() * weight
        optimizer.step()
        history.losses.append(loss_sum)
        history.step_s.append(time.perf_counter() - begun)
        on_step(step, loss_sum)
    history.note_gradients(model)
    return history


def way_of(options: argparse.Namespace) -> Train:
    """How the command line and torchrun want it trained."""
    if options.reference:
        return train_reference
    return train_process if under_torchrun() else train_pipeline


def report(recipe: Recipe, options: argparse.Namespace, history: History) -> str:
    """The run as one JSON object."""
    names = [name for name, _ in recipe.whole(0).named_parameters()]
    replicas = [
        combined_digest([f"{dp} {tp} {n}" for tp in range(options.tp) for n in names], digests)
        for dp in range(options.dp)
        if (digests := history.digests)
    ]
    return json.dumps(
        {
            "losses": history.losses,
            "step_s": history.step_s,
            "ranks": options.ranks,
            "dp": options.dp,
            "tp": options.tp,
            "engine": options.engine,
            "hint": None if options.reference or options.engine == "torch" else options.hint,
            "replica_grad_sha256": replicas,
            "grad_sha256": replicas[0] if replicas else None,
        }
    )


def _train(recipe: Recipe, options: argparse.Namespace, way: Train) -> History:
    """Train, and show how it goes."""
    text = load_text(options.data)
    with rrfp_async.Progress(options.steps) as progress:

        def tell(step: int, loss: float, result: rrfp_async.StepResult | None = None) -> None:
            if result is not None:
                progress.step(result)
            elif is_first() and (step % 5 == 4 or step == options.steps - 1):
                print(f"step {step + 1}/{options.steps}  loss {loss:.4f}", file=sys.stderr)

        return way(recipe, options, text, tell)


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


def parser_of(description: str) -> argparse.ArgumentParser:
    """The command line that the examples share."""
    parser = argparse.ArgumentParser(description=description)
    parser.set_defaults(engine="rrfp_async", tp=1)
    parser.add_argument("--ranks", type=positive, help="pipeline ranks (default 4, or torchrun's)")
    parser.add_argument("--reference", action="store_true", help="train unpartitioned")
    parser.add_argument("--steps", type=positive, default=30)
    parser.add_argument("--batch", type=positive, default=16, help="samples a step (default 16)")
    parser.add_argument("--microbatches", type=positive, default=8)
    parser.add_argument("--dp", type=positive, default=1, help="replicas (default 1)")
    parser.add_argument("--zero1", action="store_true", help="divide optimizer state by replicas")
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
    return parser


def parse_with(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """The command line, its number of ranks settled."""
    options = parser.parse_args(arguments)
    started = int(os.environ["WORLD_SIZE"]) if under_torchrun() else None
    if options.reference:
        options.ranks = options.dp = options.tp = 1
        options.zero1 = False
        return options
    pipeline = None if started is None else _pipeline_ranks(parser, options, started)
    if pipeline is not None and options.ranks not in (None, pipeline):
        parser.error(
            f"--ranks {options.ranks}, but torchrun started {started}, which makes {pipeline} "
            f"pipeline ranks: leave it out"
        )
    options.ranks = options.ranks or pipeline or 4
    _check_grid(parser, options)
    return options


def _pipeline_ranks(
    parser: argparse.ArgumentParser, options: argparse.Namespace, started: int
) -> int:
    each = options.tp * options.dp
    if started % each:
        parser.error(f"torchrun started {started} ranks, no multiple of the {each} of --tp x --dp")
    return started // each


def _check_grid(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if (options.tp > 1 or options.zero1) and not under_torchrun():
        parser.error("--tp and --zero1 need a process for every rank: start with torchrun")
    if options.batch % options.dp:
        parser.error(f"--batch {options.batch} must be a multiple of --dp {options.dp}")
    if options.zero1 and options.tp > 1:
        parser.error("--zero1 cannot divide the state of shards (torch's does not know DTensor)")
    if options.zero1 and options.dp == 1:
        parser.error("--zero1 divides optimizer state among replicas: give --dp too")


def run_example(recipe: Recipe, options: argparse.Namespace, way: Train) -> int:
    """Train and tell; returns the exit status."""
    torch.set_num_threads(1)  # bits depend on it, and each rank computes on one thread
    try:
        history = _train(recipe, options, way)
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
        print(report(recipe, options, history))
    return 0

"""A rank for tests with two stages a rank: late tensors, and budgets in bytes.

    torchrun --nproc-per-node 2 tests/ranks/worker_chunks.py late PLACEMENT SOURCE:SECONDS FOLDER
    torchrun --nproc-per-node 2 tests/ranks/worker_chunks.py budget PLACEMENT BYTES...

late: the first tensor that rank SOURCE sends to the other begins so late. budget: one Runtime for
each number of bytes, whose seventh microbatch is four times as large. Steps are compared with the
unpartitioned model's.
"""

import copy
import dataclasses
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import rrfp_async as r
from rrfp_async.ids import Link
from tests.ranks.telling import say, tell_failure
from tests.ranks.worker_delayed import with_late_sends
from tests.runtime.reference import Case, Outcome, Step, gradients_of, run_reference

RANKS, CHUNKS = 2, 2
STAGES = RANKS * CHUNKS
MICROBATCHES = 5
WIDTH = 1024  # tensors of 4 MiB
SIZES = (1, 1, 1, 1, 1, 1, 4, 1, 1, 1)
FEATURES = 512  # too large for a header
STALL_S = 5.0


class Told(nn.Module):
    """A cheap stage that tells when its forwards end."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.tells = True

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        if self.tells:
            say("forward", stage=self.index)
        return y


def late_case() -> Case:
    """One step on 4 MiB a microbatch."""
    torch.manual_seed(0)
    shape = (MICROBATCHES * WIDTH, WIDTH)
    steps = [Step({0: (torch.randn(shape),)}, torch.randn(shape))]
    return Case([Told(index) for index in range(STAGES)], steps, MICROBATCHES)


def growing_case() -> Case:
    """Two steps whose seventh microbatch is larger."""
    torch.manual_seed(1)
    stages = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(STAGES)]
    parts = [r.Microbatches([torch.randn(64 * n, FEATURES) for n in SIZES]) for _ in range(2)]
    step = Step({0: (parts[0],)}, parts[1])
    return Case(stages, [step, step], len(SIZES))


def wrong(
    world: r.World, stages: list[nn.Module], loss: float | None, wanted: Outcome
) -> list[str]:
    """What of a step on this rank is not bitwise the reference's."""
    found = [] if loss == wanted.loss else [f"loss {loss} != {wanted.loss}"]
    prefixes = tuple(f"stage {stage} " for stage in world.topology.stages_of(world.rank))
    for name, gradient in gradients_of(stages).items():
        reference = wanted.gradients[name]
        if name.startswith(prefixes) and not (
            isinstance(gradient, Tensor)
            and isinstance(reference, Tensor)
            and torch.equal(gradient, reference)
        ):
            found.append(name)
    return found


async def run_case(world: r.World, case: Case, config: r.Config, expected: list[Outcome]) -> None:
    """Every step of the case, told with what is wrong with it."""
    stages = copy.deepcopy(list(case.stages))
    owned = [stages[stage] for stage in world.topology.stages_of(world.rank)]
    async with r.Runtime(owned, world=world, config=config, loss_fn=case.loss_fn) as runtime:
        for step, outcome in zip(case.steps, expected, strict=True):
            result = await runtime.train_step(*step.inputs[0], target=step.target)
            faults = wrong(world, stages, result.loss, outcome)
            say("step", wrong=faults, peak=result.peak_in_flight, loss=result.loss)


def expected_of(case: Case) -> list[Outcome]:
    """The reference's outcomes; its stages tell nothing."""
    silent = copy.deepcopy(list(case.stages))
    for stage in silent:
        stage.tells = False
    return run_reference(dataclasses.replace(case, stages=silent))


async def late(world: r.World, source: int, late_s: float, folder: Path) -> None:
    """One step with a late tensor."""
    case = late_case()
    expected = expected_of(case)
    world = with_late_sends(world, Link(source, 1 - source), {0: late_s})
    config = r.Config(
        microbatches=MICROBATCHES, trace_dir=folder, return_outputs=False, limit=MICROBATCHES * 4
    )
    async with world:
        await run_case(world, case, config, expected)


async def budgets(world: r.World, sizes: list[int]) -> None:
    """One Runtime after the other, whether their steps succeed or not."""
    case = growing_case()
    expected = expected_of(case)
    async with world:
        for size in sizes:
            begun = time.monotonic()
            config = r.Config(
                microbatches=len(SIZES), activation_budget_bytes=size, stall_timeout_s=STALL_S
            )
            try:
                await run_case(world, case, config, expected)
            except (ValueError, r.RrfpError) as error:
                tell_failure(error, budget=size)
            say("done", budget=size, took_s=time.monotonic() - begun)


def main() -> int:
    """Run the command line."""
    torch.set_num_threads(1)
    what, word, *rest = sys.argv[1:]
    placement = tuple(map(int, word.split(","))) if "," in word else word
    world = r.torchrun_world(r.Topology(RANKS, chunks=CHUNKS, placement=placement))
    if what == "late":
        source, late_s = rest[0].split(":")
        r.run(lambda: late(world, int(source), float(late_s), Path(rest[1])))
    else:
        r.run(lambda: budgets(world, list(map(int, rest))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A rank for tests: shapes that change by microbatch and step, compared with the whole model.

torchrun --nproc-per-node 2 tests/ranks/worker_lengths.py FIRST_SEED SEEDS
"""

import copy
import gc
import sys

import torch
from torch import nn

import rrfp_async as r
from rrfp_async import Microbatches
from tests.ranks.telling import say
from tests.runtime.reference import Case, Outcome, Step, gradients_of, run_reference

WIDTH = 6
LENGTHS = ((5, 9, 3, 7), (4, 1, 12, 2), (7, 3, 9, 5))
SAMPLES = (2, 4, 2)  # doubled on the second step


def case_for(ranks: int) -> Case:
    """Three steps of four microbatches, (samples, length, width) each."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(ranks)]
    steps = []
    for lengths, samples in zip(LENGTHS, SAMPLES, strict=True):
        shapes = [(samples, length, WIDTH) for length in lengths]
        inputs = Microbatches([torch.randn(shape) for shape in shapes])
        targets = Microbatches([torch.randn(shape) for shape in shapes])
        steps.append(Step({0: (inputs,)}, targets))
    return Case(stages, steps, 4, make_optimizer=lambda held: torch.optim.SGD(held, lr=0.1))


def differences(rank: int, stage: nn.Module, result: r.StepResult, expected: Outcome) -> list[str]:
    """What of a step is not bitwise the reference's: loss, losses, gradients of this stage."""
    wrong = [] if result.loss == expected.loss else [f"loss {result.loss} != {expected.loss}"]
    if result.losses not in ([], expected.losses):
        wrong.append(f"losses {result.losses} != {expected.losses}")
    for name, gradient in gradients_of([stage]).items():
        reference = expected.gradients[name.replace("stage 0", f"stage {rank}")]
        if gradient is None or reference is None or not torch.equal(gradient, reference):
            wrong.append(f"gradient of {name}")
    return wrong


async def _main(world: r.World, case: Case, expected: list[Outcome], seeds: range) -> None:
    async with world:
        for seed in seeds:
            await _run_seed(world, case, expected, seed)


async def _run_seed(world: r.World, case: Case, expected: list[Outcome], seed: int) -> None:
    stage = copy.deepcopy(case.stages[world.rank])
    runtime = r.Runtime(
        stage,
        world=r.with_delays(world, r.Delays(seed, send_most_s=0.003, task_most_s=0.001)),
        config=r.Config(microbatches=case.microbatches),
        loss_fn=case.loss_fn,
        optimizer=case.make_optimizer,
    )
    async with runtime:
        gc.collect()  # what earlier Runtimes left behind must not touch this one's sockets
        for number, step in enumerate(case.steps):
            result = await runtime.train_step(*step.inputs[0], target=step.target)
            wrong = differences(world.rank, stage, result, expected[number])
            say("step", seed=seed, step=number, wrong=wrong, loss=result.loss)


def main() -> int:
    """Run the command line."""
    torch.set_num_threads(1)
    first, count = map(int, sys.argv[1:])
    world = r.torchrun_world()
    case = case_for(world.topology.world_size)
    expected = run_reference(case)
    r.run(lambda: _main(world, case, expected, range(first, first + count)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

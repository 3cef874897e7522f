"""A rank for tests: cases of `ranks_cases`, one after another, against the unpartitioned model.

    torchrun --nproc-per-node 4 tests/parity/worker.py NAME...

Each runs as it comes and over shaken arrival orders. Every step is told, with what differs on this
rank.
"""

import copy
import sys
import warnings
from functools import partial

import torch

import rrfp_async as r
from tests.parity.ranks_cases import CASES
from tests.ranks.telling import say
from tests.runtime.parity import build, differences, given_to, own, shaken, topology_of
from tests.runtime.reference import Case, Outcome, run_reference

SEEDS = (None, 1, 2)


def of_rank(outcome: Outcome, owned: tuple[int, ...], *, has_losses: bool) -> Outcome:
    """What a rank that owns these stages sees of a step."""
    prefixes = tuple(f"stage {stage} " for stage in owned)
    gradients, parameters = (
        {name: value for name, value in held.items() if name.startswith(prefixes)}
        for held in (outcome.gradients, outcome.parameters)
    )
    return Outcome(outcome.loss, outcome.losses if has_losses else [], [], gradients, parameters)


async def run_case(case: Case, name: str, expected: list[Outcome], seed: int | None) -> None:
    """All steps of a case on this rank."""
    stages = copy.deepcopy(list(case.stages))
    topology = topology_of(case)
    world = r.torchrun_world(topology)
    owned = topology.stages_of(world.rank)
    async with (
        world,
        build(case, stages, world if seed is None else shaken(seed)(world), None) as runtime,
    ):
        for number, (step, whole) in enumerate(zip(case.steps, expected, strict=True)):
            args, kwargs = given_to(owned, step)
            result = await runtime.train_step(
                *args, target=step.target, update=step.update, **kwargs
            )
            got = Outcome(result.loss, result.losses, [], *own(stages, owned))
            wanted = of_rank(whole, owned, has_losses=topology.last_stage in owned)
            wrong = differences([wanted], [got])
            compared = len(got.parameters)
            say("step", case=name, seed=seed, step=number, wrong=wrong, compared=compared)


def main() -> int:
    """Run the command line."""
    torch.set_num_threads(1)
    ranks = r.torchrun_world().topology.world_size
    for name in sys.argv[1:]:
        case = CASES[ranks][name]()
        expected = run_reference(case)
        for seed in SEEDS:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                r.run(partial(run_case, case, name, expected, seed))
            texts = [str(each.message) for each in told if each.category is RuntimeWarning]
            say("warned", case=name, seed=seed, texts=texts)
    return 0


if __name__ == "__main__":
    sys.exit(main())

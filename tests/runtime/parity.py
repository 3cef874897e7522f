"""Running a `reference.Case` through rrfp_async, over random arrival orders, and comparing."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import rrfp_async as r
from tests.logs import records
from tests.runtime.reference import (
    Case,
    Gradients,
    Outcome,
    Step,
    gradients_of,
    parameters_of,
    run_reference,
)

SEEDS = range(20)
SEND_MOST_S = 0.004
TASK_MOST_S = 0.001

Wrap = Callable[[r.World], r.World]
_OfRank: TypeAlias = tuple[r.StepResult, Gradients, Gradients]


@dataclass(frozen=True)
class Run:
    """What a pipelined run came to.

    Attributes:
        outcomes: One per step, put together from all ranks.
        results: `StepResult`s by rank, then step.
        orders: Dispatched tasks as words, by rank, over all steps.
    """

    outcomes: list[Outcome]
    results: list[list[r.StepResult]]
    orders: list[list[str]]


def topology_of(case: Case) -> r.Topology:
    edges = None if case.edges is None else tuple(r.Edge(*edge) for edge in case.edges)
    ranks = len(case.stages) // case.chunks
    return r.Topology(ranks, edges, case.chunks, case.placement, tied=case.tied)


def shaken(seed: int, *, send_most_s: float = SEND_MOST_S) -> Wrap:
    """A world with small delays drawn from `seed`."""
    delays = r.Delays(seed, send_most_s=send_most_s, task_most_s=TASK_MOST_S)
    return lambda world: r.with_delays(world, delays)


async def pipelined(case: Case, folder: Path, *, wrap: Wrap | None = None) -> Run:
    """The case's steps on all its ranks, in this process."""
    torch.set_num_threads(1)
    stages = copy.deepcopy(list(case.stages))
    topology = topology_of(case)

    async def main(world: r.World) -> list[_OfRank]:
        async with build(case, stages, world if wrap is None else wrap(world), folder) as runtime:
            return [await _one(runtime, stages, world, step) for step in case.steps]

    by_rank = await r.run_local(topology.world_size, main, topology=topology)
    last_rank = topology.rank_of(topology.last_stage)
    outcomes = [_joined([rank[i] for rank in by_rank], last_rank) for i in range(len(case.steps))]
    results = [[result for result, *_ in rank] for rank in by_rank]
    return Run(outcomes, results, [order_of(folder, rank) for rank in range(len(by_rank))])


def build(case: Case, stages: list[nn.Module], world: r.World, folder: Path | None) -> r.Runtime:
    """The Runtime of one rank of the case."""
    options = {"microbatches": case.microbatches, "trace_dir": folder, **case.options}
    return r.Runtime(
        [stages[stage] for stage in world.topology.stages_of(world.rank)],
        world=world,
        config=r.Config(**options),
        loss_fn=case.loss_fn,
        loss_reduction=case.count or "mean",
        optimizer=case.make_optimizer,
        **case.specs,
    )


async def _one(runtime: r.Runtime, stages: list[nn.Module], world: r.World, step: Step) -> _OfRank:
    owned = world.topology.stages_of(world.rank)
    args, kwargs = given_to(owned, step)
    if step.training:
        result = await runtime.train_step(*args, target=step.target, update=step.update, **kwargs)
    else:
        result = await runtime.eval_step(*args, target=step.target, **kwargs)
    return result, *own(stages, owned)


def given_to(owned: Iterable[int], step: Step) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the step for a rank that owns these stages."""
    args = next((step.inputs[stage] for stage in owned if stage in step.inputs), ())
    kwargs = next((step.kwargs[stage] for stage in owned if stage in step.kwargs), {})
    return args, dict(kwargs)


def own(stages: Sequence[nn.Module], owned: Sequence[int]) -> tuple[Gradients, Gradients]:
    """The gradients and the parameters of the stages that a rank owns."""
    others = nn.Module()  # the other ranks' are being written to
    held = [stage if index in owned else others for index, stage in enumerate(stages)]
    return gradients_of(held), parameters_of(held)


def _joined(ranks: list[_OfRank], last_rank: int) -> Outcome:
    last = ranks[last_rank][0]
    assert {result.loss for result, *_ in ranks} == {last.loss}, "ranks disagree on the loss"
    gradients = {name: grad for _, held, _ in ranks for name, grad in held.items()}
    parameters = {name: value for _, _, held in ranks for name, value in held.items()}
    return Outcome(last.loss, last.losses, last.outputs, gradients, parameters)


def order_of(folder: Path, rank: int) -> list[str]:
    """The tasks that `rank` dispatched, from its log."""
    return [record["task"] for record in records_of(folder, rank)]


def records_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """The dispatches in the log of `rank`."""
    return records(folder, rank, "dispatch")


def differences(
    expected: list[Outcome], actual: list[Outcome], *, within: float = 0.0
) -> list[str]:
    """Where two runs differ, in words; bit for bit unless `within` allows more."""
    assert len(expected) == len(actual)
    found = []
    for number, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
        pairs = {f"step {number} loss": (wanted.loss, got.loss)}
        pairs[f"step {number} losses"] = (wanted.losses, got.losses)
        for name in wanted.gradients.keys() | got.gradients.keys():
            both = (wanted.gradients.get(name), got.gradients.get(name))
            pairs[f"step {number} gradient of {name}"] = both
        for name in wanted.parameters.keys() | got.parameters.keys():
            both = (wanted.parameters.get(name), got.parameters.get(name))
            pairs[f"step {number} parameter {name}"] = both
        found += [name for name, pair in pairs.items() if not _same(*pair, within)]
    return found


def _same(wanted: Any, got: Any, within: float) -> bool:
    if isinstance(wanted, Tensor) and isinstance(got, Tensor):
        if wanted.dtype != got.dtype or wanted.shape != got.shape:
            return False
        if within == 0.0:
            return torch.equal(wanted, got)
        return bool((wanted - got).abs().max() <= within)
    if isinstance(wanted, list) and isinstance(got, list):
        paired = zip(wanted, got, strict=False)
        return len(wanted) == len(got) and all(_same(*pair, within) for pair in paired)
    if isinstance(wanted, float) and isinstance(got, float):
        return abs(wanted - got) <= within
    return wanted is None and got is None


async def assert_parity(
    case: Case,
    folder: Path,
    *,
    seeds: Iterable[int] = SEEDS,
    within: float = 0.0,
    orders_differ: bool = True,
    send_most_s: float = SEND_MOST_S,
) -> list[Run]:
    """Loss and every gradient equal the reference's over all seeds, whose orders really differ."""
    expected = run_reference(case)
    runs = []
    for seed in seeds:
        run = await pipelined(
            case, folder / f"seed{seed}", wrap=shaken(seed, send_most_s=send_most_s)
        )
        assert differences(expected, run.outcomes, within=within) == [], f"delays of seed {seed}"
        runs.append(run)
    if orders_differ:
        assert len({str(run.orders) for run in runs}) > 1, "every seed gave the same order"
    return runs


def linear_stages(count: int, *, width: int = 8, dtype: torch.dtype = torch.float32) -> list[Any]:
    """`count` stages of a linear layer and a tanh."""
    torch.manual_seed(7)
    return [nn.Sequential(nn.Linear(width, width, dtype=dtype), nn.Tanh()) for _ in range(count)]


def chain_case(ranks: int, *, microbatches: int, batch: int = 8, **more: Any) -> Case:
    """Linear stages in a chain, one training step on a batch of random vectors."""
    dtype = more.pop("dtype", torch.float32)
    stages = more.pop("stages", None) or linear_stages(ranks, dtype=dtype)
    torch.manual_seed(11)
    steps = [Step({0: (torch.randn(batch, 8, dtype=dtype),)}, torch.randn(batch, 8, dtype=dtype))]
    return replace(Case(stages, steps, microbatches), **more)

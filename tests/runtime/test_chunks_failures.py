"""Several stages a rank: what is refused before a step, and who is named when one fails."""

import asyncio
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rrfp_async as r
from tests.runtime.parity import build, linear_stages
from tests.runtime.reference import Case
from tests.runtime.test_hazards_failure import Faulty
from tests.runtime.worlds import each_rank

RANKS, CHUNKS = 2, 2
PLACEMENTS = {"loop": (0, 1, 0, 1), "v": (0, 1, 1, 0), "halves": (0, 0, 1, 1)}


def topology(placement: str) -> r.Topology:
    where = PLACEMENTS[placement] if placement == "halves" else placement
    return r.Topology(RANKS, chunks=CHUNKS, placement=where)


def numbered() -> Tensor:
    """Four samples that carry the number of their microbatch."""
    batch = torch.randn(4, 8)
    batch[:, -1] = torch.arange(4)
    return batch


async def two_steps(case: Case, world: r.World) -> list[BaseException | r.StepResult]:
    """What the first step and the next one raise."""
    async with build(case, list(case.stages), world, None) as runtime:
        ends: list[Any] = []
        for _ in range(2):
            args = (numbered(),) if world.rank == 0 else ()
            try:
                ends.append(await runtime.train_step(*args, target=torch.randn(4, 8)))
            except Exception as error:
                ends.append(error)
        return ends


async def fail(stages: list[nn.Module], placement: str, **more: Any) -> list[Any]:
    """What every rank's two steps end in."""
    case = Case(stages, [], microbatches=4, **more)
    async with asyncio.timeout(5.0):
        return await each_rank(
            RANKS, lambda world: two_steps(case, world), topology=topology(placement)
        )


def assert_told(ends: list[Any], *, stage: int, kind: str, microbatch: int, rank: int) -> None:
    """Every rank raised StepFailed that names the place, and refuses the next step."""
    task = f"{stage}{kind}{microbatch}"
    for first, second in ends:
        assert isinstance(first, r.StepFailed), first
        told = (first.rank, first.stage, first.task, first.microbatch)
        assert told == (rank, stage, task, microbatch)
        assert f"rank {rank}, stage {stage}, task {task}" in str(first)
        assert first.records[-1].endswith(f"dispatched {task}")
        assert isinstance(second, r.StateError)


FAULTS = {
    "bf-F": {"forward": 2},
    "bf-B": {"backward": 1},
    "bfw-F": {"forward": 2},
    "bfw-I": {"backward": 1},
}


@pytest.mark.parametrize("where", list(FAULTS))
@pytest.mark.parametrize("placement", list(PLACEMENTS))
@pytest.mark.parametrize("stage", [1, 2, 3])
async def test_an_exception_in_a_chunk_names_its_stage_everywhere(
    where: str, placement: str, stage: int
) -> None:
    """Hazard 18 where a rank has other stages too: rank, stage, task, microbatch and cause."""
    hint, kind = where.split("-")
    fault = FAULTS[where]
    stages = [Faulty(**fault) if index == stage else Faulty() for index in range(4)]
    ends = await fail(stages, placement, options={"hint": hint})
    rank, [microbatch] = PLACEMENTS[placement][stage], fault.values()
    assert_told(ends, stage=stage, kind=kind, microbatch=microbatch, rank=rank)
    assert isinstance(ends[rank][0].__cause__, ArithmeticError)


def bad_loss(output: Tensor, target: Tensor) -> Tensor:
    if int(output[0, -1]) == 2:
        raise ArithmeticError("no loss today")
    return nn.functional.mse_loss(output, target)


@pytest.mark.parametrize("placement", list(PLACEMENTS))
async def test_an_exception_in_the_loss_names_the_last_stage(placement: str) -> None:
    """Wherever that lives: on the first rank, in a V."""
    ends = await fail([Faulty() for _ in range(4)], placement, loss_fn=bad_loss)
    rank = PLACEMENTS[placement][3]
    assert_told(ends, stage=3, kind="F", microbatch=2, rank=rank)


class Wordy(nn.Module):
    """Hands on a set, which no stage can be given."""

    def forward(self, x: Tensor) -> Any:
        return {"hidden": x, "words": {"a"}}


@pytest.mark.parametrize("placement", ["loop", "halves"])
async def test_what_is_no_tensor_is_not_handed_over(placement: str) -> None:
    """Along a local edge as along a link: a TypeError in the task of the stage that made it."""
    ends = await fail([Wordy(), *linear_stages(3)], placement)
    for first, _ in ends:
        assert (first.stage, first.task) == (0, "0F0")
        assert "stage 0 returned a set" in first.cause


class Pair(nn.Module):
    """Hands on two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize("placement", ["loop", "halves"])
async def test_a_stage_that_is_handed_too_many_tensors_is_named(placement: str) -> None:
    """The stage that takes them raises, in its own forward."""
    ends = await fail([Pair(), *linear_stages(3)], placement)
    for first, _ in ends:
        assert (first.stage, first.task) == (1, "1F0")
        assert first.cause.startswith("TypeError: ")


# -- before the first step -------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 4])
@pytest.mark.parametrize("placement", list(PLACEMENTS))
async def test_a_wrong_number_of_modules_is_refused(placement: str, count: int) -> None:
    """The error names rank, how many came, all stages, those it owns, and the remedy."""
    async with r.local_world(RANKS, topology(placement)) as worlds:
        owned = list(topology(placement).stages_of(1))
        with pytest.raises(ValueError, match=f"rank 1 was given {count} stage modules") as caught:
            r.Runtime(linear_stages(count), world=worlds[1], config=r.Config(microbatches=4))
    assert f"of the 4 stages it owns {owned}: give one module for each" in str(caught.value)


async def test_one_module_where_a_rank_owns_two_is_refused() -> None:
    """A Sequential of two layers is one module, not two; a ModuleList is a list."""
    async with r.local_world(RANKS, topology("loop")) as worlds:
        config = r.Config(microbatches=4)
        whole = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        with pytest.raises(ValueError, match=r"rank 0 was given 1 stage modules.*owns \[0, 2\]"):
            r.Runtime(whole, world=worlds[0], config=config)
        parts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, bias=False)])
        runtime = r.Runtime(parts, world=worlds[0], config=config)
        assert [p.shape for p in runtime.parameters()] == [(8, 8), (8,), (8, 8)]


async def test_what_is_no_module_is_refused() -> None:
    """Any of the list, by its type."""
    async with r.local_world(RANKS, topology("loop")) as worlds:
        parts: Any = [nn.Linear(8, 8), lambda x: x]
        with pytest.raises(ValueError, match=r"a stage of rank 1 is a function: give an nn\."):
            r.Runtime(parts, world=worlds[1], config=r.Config(microbatches=4))


async def test_a_placement_that_differs_between_ranks_is_named() -> None:
    """As any other setting: found when the ranks greet each other, with both values."""
    stages = linear_stages(4)

    async def main(world: r.World) -> r.StepResult:
        if world.rank == 1:
            world = dataclasses.replace(world, topology=topology("v"))
        owned = [stages[stage] for stage in world.topology.stages_of(world.rank)]
        config = r.Config(microbatches=4, stall_timeout_s=2.0)
        async with r.Runtime(
            owned, world=world, config=config, loss_fn=nn.functional.mse_loss
        ) as runtime:
            return await runtime.train_step(torch.ones(4, 8), target=torch.ones(4, 8))

    async with asyncio.timeout(8.0):
        ends = await each_rank(RANKS, main, topology=topology("loop"))
    for end in ends:
        assert isinstance(end, Exception)
        assert "placement" in str(end)

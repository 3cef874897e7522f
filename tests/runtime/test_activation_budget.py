"""`activation_budget_bytes` on running stages: it bounds what is kept, and never stops a step."""

import asyncio
import re
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rrfp_async as r
from tests.runtime.chunks import assert_chunk_parity, chunked, on_one_rank, sgd
from tests.runtime.parity import build, chain_case, linear_stages, pipelined, topology_of
from tests.runtime.reference import Case, Step
from tests.runtime.test_hazards_tensors import InPlace
from tests.runtime.test_split_hazards import Recomputing
from tests.runtime.worlds import each_rank

ROW = 8 * 4
"""Bytes of one sample between two stages: 8 floats."""
PER_SAMPLE = 2 * ROW
"""What a linear layer and a tanh keep for one: their input and their output."""
HINTS = [
    "bf",
    "auto",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("bf-deep", "bfw", "bfw-deep", "f-priority")
    ),
]
SCALARS = 16
"""Bytes of room for what comes in ones, such as the loss."""
STALL_S = 1.0


def varied(*sizes: int) -> Step:
    """A step whose microbatches have so many samples."""
    parts = [[torch.randn(size, 8) for size in sizes] for _ in range(2)]
    return Step({0: (r.Microbatches(parts[0]),)}, r.Microbatches(parts[1]))


def budgeted(case: Case, samples: int, *, forwards: int, **options: Any) -> Case:
    """The case with a budget of so many forwards of so many samples."""
    budget = forwards * (samples * PER_SAMPLE + SCALARS)
    options = {"stall_timeout_s": STALL_S, "activation_budget_bytes": budget, **options}
    return replace(case, options={**case.options, **options})


async def run(case: Case) -> list[Any]:
    """What the steps come to on every rank, or what it raises."""
    stages, topology = list(case.stages), topology_of(case)

    async def main(world: r.World) -> list[r.StepResult]:
        async with build(case, stages, world, None) as runtime:
            args = [step.inputs[0] if world.rank == 0 else () for step in case.steps]
            return [
                await runtime.train_step(*given, target=step.target)
                for given, step in zip(args, case.steps, strict=True)
            ]

    async with asyncio.timeout(20.0):
        return await each_rank(topology.world_size, main, topology=topology)


def assert_within(ends: Sequence[Any], most: int, *, steps: slice = slice(None)) -> None:
    """Every rank ended its steps; its peak in these was at most so many forwards."""
    for rank, results in enumerate(ends):
        assert isinstance(results, list), f"rank {rank}: {results}"
        peaks = [result.peak_in_flight for result in results[steps]]
        assert max(peaks) <= most, f"rank {rank} held {peaks} forwards, its budget is for {most}"


def causes(ends: Sequence[Any]) -> list[str]:
    """What every rank says that its step failed of."""
    assert all(isinstance(end, ValueError | r.StepFailed) for end in ends), ends
    return [str(end) for end in ends]


# -- equal microbatches ----------------------------------------------------------------------------


@pytest.mark.parametrize("hint", HINTS)
@pytest.mark.parametrize("forwards", [2, 5])
@pytest.mark.parametrize("placement", ["v", pytest.param("loop", marks=pytest.mark.slow)])
async def test_the_peak_is_what_the_budget_holds(hint: str, forwards: int, placement: str) -> None:
    """From the least to some more: never past it, from the second step on.

    In the first, stage 0 is seen before those that keep twice as much.
    """
    case = chunked(2, placement, microbatches=8, batch=16)
    case = budgeted(replace(case, steps=case.steps * 2), 2, forwards=forwards, hint=hint)
    assert_within(await run(case), forwards, steps=slice(1, None))


@pytest.mark.parametrize("placement", ["v", pytest.param("loop", marks=pytest.mark.slow)])
@pytest.mark.parametrize("hint", ["bf", "bfw"])
async def test_a_budget_changes_no_bit(tmp_path: Path, placement: str, hint: str) -> None:
    """It chooses an order and nothing else: parity, in place or not, over SGD steps."""
    torch.manual_seed(3)
    stages = [*linear_stages(1), InPlace(), InPlace(), *linear_stages(2), InPlace()]
    case = chunked(2, placement, microbatches=6, batch=12, stages=stages, make_optimizer=sgd)
    case = budgeted(replace(case, steps=case.steps * 2), 2, forwards=6, hint=hint)
    await assert_chunk_parity(case, tmp_path, seeds=range(1), orders_differ=False)


async def test_a_budget_with_room_holds_nothing_back() -> None:
    """A rank that wants many forwards in flight gets them: a gigabyte is no limit here."""
    options = {"hint": "f-priority", "limit": 16}
    for chunks, peak in ((1, 16), (2, 18)):
        case = chain_case(chunks, microbatches=16, batch=16, options=options)
        case = on_one_rank(replace(case, steps=case.steps * 2))
        [results] = await run(budgeted(case, 2**24, forwards=1))
        assert results[1].peak_in_flight == peak


FIRST = {
    "linear": nn.Linear(8, 8),
    "embedding": nn.Embedding(8, 8),
}


@pytest.mark.parametrize("first", list(FIRST))
async def test_a_stage_that_saves_nothing_is_not_held_back(first: str) -> None:
    """What is known to keep next to nothing fits any budget: the pipeline is not serialised.

    Such are most first stages: what autograd saves of an embedding is the user's batch. (Of one
    without trainable parameters nothing is ever in flight.)
    """
    stages = [FIRST[first], *linear_stages(1)]
    x = torch.randint(0, 8, (16,)) if first == "embedding" else torch.randn(16, 8)
    case = Case(stages, [Step({0: (x,)}, torch.randn(16, 8))] * 2, microbatches=16)
    ends = await run(budgeted(case, 2**24, forwards=1, hint="f-priority"))
    assert ends[0][1].peak_in_flight > 1


class Held(nn.Module):
    """Adds up the bytes of its outputs that something still refers to, at each forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.most_bytes = 0
        self._outputs: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(x)
        self._outputs = [held for held in self._outputs if held() is not None]
        self._outputs.append(weakref.ref(output))
        sizes = [held().untyped_storage().nbytes() for held in self._outputs]
        self.most_bytes = max(self.most_bytes, sum(sizes))
        return output


class Slow(nn.Module):
    """Takes its time, so that the rank before it runs ahead."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return self.inner(x)


async def test_outputs_that_a_stage_keeps_count() -> None:
    """A wide output is kept until its backward, whether an operation has saved it or not."""
    samples, width = 2, 4096
    wide = Held(nn.Linear(8, width))
    stages = [*linear_stages(1), wide, Slow(nn.Linear(width, 8)), *linear_stages(1)]
    output = samples * width * 4
    budget = 4 * output
    options = {"activation_budget_bytes": budget, "hint": "f-priority"}
    case = chain_case(4, microbatches=12, batch=12 * samples, stages=stages, options=options)
    ends = await run(replace(case, steps=case.steps * 2, chunks=2, placement=(0, 0, 1, 1)))
    assert all(isinstance(results, list) for results in ends), ends
    assert wide.most_bytes <= budget, f"{wide.most_bytes} bytes of outputs alone"


@pytest.mark.parametrize("hint", ["bf", "bfw"])
async def test_the_users_batch_does_not_count(hint: str) -> None:
    """A microbatch of it is a view into the whole, which the user holds: split or not."""
    case = chain_case(2, microbatches=16, batch=32)
    case = budgeted(replace(case, steps=case.steps * 2), 2, forwards=2, hint=hint)
    ends = await run(case)
    assert all(isinstance(results, list) for results in ends), ends


class Graph(nn.Module):
    """Multiplies with a sparse matrix, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("adjacency", torch.eye(8).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.adjacency, self.linear(x).t()).t()


async def test_a_stage_may_save_sparse_tensors(tmp_path: Path) -> None:
    """They have no one storage, and are counted or not, but no error: parity."""
    stages = [*linear_stages(1), Graph(), *linear_stages(1)]
    case = chain_case(3, microbatches=4, stages=stages)
    case = budgeted(case, 2, forwards=8)
    await assert_chunk_parity(case, tmp_path, seeds=range(1), orders_differ=False)


# -- microbatches that differ ----------------------------------------------------------------------


GROWING = {
    "one large": (1, 1, 1, 1, 1, 1, 4, 1, 1, 1, 1, 1),
    "late large": (1,) * 11 + (4,),
    "rising": (1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4),
    "falling": (4, 4, 4, 3, 3, 3, 2, 2, 2, 1, 1, 1),
}


@pytest.mark.parametrize("hint", HINTS)
@pytest.mark.parametrize("sizes", list(GROWING))
@pytest.mark.parametrize(
    "deterministic", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["ordered", "free"]
)
@pytest.mark.parametrize("placement", ["loop", pytest.param("v", marks=pytest.mark.slow)])
async def test_a_larger_microbatch_never_stops_a_step(
    hint: str, sizes: str, deterministic: bool, placement: str
) -> None:
    """The limit falls while more is in flight: the oldest must still get through all chunks.

    Once the largest is known, in the second step, the peak is what the budget holds of it.
    """
    case = chunked(2, placement, microbatches=12)
    case = replace(case, steps=[varied(*GROWING[sizes])] * 2)
    case = budgeted(case, 4, forwards=4, hint=hint, deterministic=deterministic)
    assert_within(await run(case), 4, steps=slice(1, None))


@pytest.mark.parametrize("hint", ["f-priority", "bf", "bfw-deep"])
@pytest.mark.parametrize("chunks", [1, 2, 3])
async def test_the_step_in_which_a_larger_microbatch_comes_keeps_the_budget_too(
    tmp_path: Path, hint: str, chunks: int
) -> None:
    """One rank: what its log says is in flight, in bytes. Four small ones, then large ones only.

    When the first large one is known, no more of them come in than fit, beside the small ones.
    """
    case = chain_case(chunks, microbatches=20, options={"limit": 64})
    case = on_one_rank(replace(case, steps=[varied(*[1] * 4, *[4] * 16)]))
    case = budgeted(case, 4, forwards=2 + 2 * chunks, hint=hint)
    run = await pipelined(case, tmp_path)
    held = most = 0
    for task in map(r.TaskId.parse, run.orders[0]):
        size = (1 if task.microbatch < 4 else 4) * (PER_SAMPLE if task.stage else ROW)
        held += {"F": size, "B": -size, "W": -size}.get(task.kind.value, 0)
        most = max(most, held)
    assert most <= case.options["activation_budget_bytes"]


class Wide(nn.Module):
    """A stage that keeps many times what a plain one does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("hint", HINTS)
@pytest.mark.parametrize("placement", ["loop", "v", "one rank"])
async def test_a_heavy_chunk_behind_a_light_one_never_stops_a_step(
    hint: str, placement: str
) -> None:
    """The light one's forwards fill what the heavy one then does not leave: equal microbatches."""
    torch.manual_seed(4)
    stages = [*linear_stages(2), Wide(64), Wide(64)]
    case = chain_case(4, microbatches=12, batch=12, stages=stages)
    case = on_one_rank(case) if placement == "one rank" else replace(case, chunks=2)
    case = replace(case, placement="v" if placement == "v" else "loop")
    splits = r.Config(microbatches=1, hint=hint).splits
    heavy = (8 + 64 + 64 + 8) * 4 if splits else (8 + 64 + 8) * 4
    options = {"activation_budget_bytes": 6 * heavy, "stall_timeout_s": STALL_S, "hint": hint}
    case = replace(case, options=options, steps=case.steps * 2)
    assert_within(await run(case), 6, steps=slice(1, None))


class YoungestFirst(r.RankedHint):
    """Forwards of the highest microbatch first: the oldest one is last everywhere."""

    def rank(self, task: r.TaskId) -> Any:
        return (task.kind is not r.TaskKind.F, -task.microbatch)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_one_chunk_whose_oldest_microbatch_comes_last_is_not_stopped(ranks: int) -> None:
    """A place is kept for it, and must be kept when the limit falls."""
    case = chain_case(ranks, microbatches=10, batch=10)
    case = replace(case, steps=[varied(1, 1, 1, 1, 4, 1, 1, 1, 1, 1)] * 2)
    case = budgeted(case, 4, forwards=2, hint=YoungestFirst())
    assert_within(await run(case), 4, steps=slice(1, None))  # one stage of two keeps half


@pytest.mark.parametrize("hint", ["bf", "bfw"])
async def test_a_budget_holds_checkpointed_stages(tmp_path: Path, hint: str) -> None:
    """Recomputed and split or not: parity."""
    case = chain_case(4, microbatches=8, batch=16, stages=[Recomputing() for _ in range(4)])
    case = replace(case, chunks=2, placement="v", steps=case.steps * 2)
    case = budgeted(case, 2, forwards=24, hint=hint)
    await assert_chunk_parity(case, tmp_path, seeds=range(2), orders_differ=False)


async def test_what_is_recomputed_does_not_count() -> None:
    """A checkpointed stage keeps its input and its output: as many fit as of a plain layer."""
    case = chain_case(4, microbatches=8, batch=16, stages=[Recomputing() for _ in range(4)])
    case = budgeted(replace(case, chunks=2, placement="v"), 2, forwards=4, hint="bf")
    assert all(isinstance(end, list) for end in await run(case))
    whole = replace(case, stages=[stage.block for stage in case.stages])
    assert all("is below" in cause for cause in causes(await run(whole)))


# -- too small a budget ----------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("hint", ["bf", "bfw"])
async def test_too_small_a_budget_fails_the_step_on_every_rank(chunks: int, hint: str) -> None:
    """One byte short of what must fit: named with the least that would do. A little more does."""
    least = chunks
    needed = least * 2 * PER_SAMPLE
    case = replace(chain_case(2 * chunks, microbatches=6, batch=12), chunks=chunks)
    case = budgeted(case, 2, forwards=least, hint=hint)
    short = replace(case, options={**case.options, "activation_budget_bytes": needed - 1})
    for cause in causes(await run(short)):
        [given, least_bytes] = re.findall(r"activation_budget_bytes=(\d+) is below (\d+), ", cause)[
            0
        ]
        assert int(given) == needed - 1
        assert needed <= int(least_bytes) <= needed + least * SCALARS
    assert all(isinstance(end, list) for end in await run(case))


async def test_a_budget_that_a_later_microbatch_passes_fails_the_step_on_every_rank() -> None:
    """Named likewise, though forwards of smaller ones are in flight: from stage 0 or a later."""
    case = replace(chunked(2, "v", microbatches=8), steps=[varied(1, 1, 1, 1, 1, 9, 1, 1)])
    half = 2 * 9 * ROW  # stage 0 keeps no input
    for cause in causes(await run(budgeted(case, 1, forwards=8))):
        least_bytes = int(re.findall(r"is below (\d+), ", cause)[0])
        assert half <= least_bytes <= 2 * half + 2 * SCALARS

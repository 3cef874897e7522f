"""HAZARDS.md 21 and 22 with several stages a rank: what is kept, and for how long."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rrfp_async as r
from rrfp_async.arbiter import Arbiter
from rrfp_async.tasks.stage import Stage
from tests.runtime.chunks import EVERY_SEED, assert_chunk_parity
from tests.runtime.parity import build, linear_stages, topology_of
from tests.runtime.reference import Case, Step
from tests.runtime.test_hazards_memory import live_tensors

MICROBATCHES = 8
PLACED = [(2, "loop"), (2, "v"), (2, (0, 0, 1, 1)), (4, "loop")]
"""Chunks and placement of four stages."""
NAMES = ["loop", "v", "halves", "one rank"]
LONG = [pytest.param(*PLACED[n], marks=pytest.mark.slow, id=NAMES[n]) for n in (0, 2)]
MOSTLY_LONG = [*(pytest.param(*PLACED[n], id=NAMES[n]) for n in (1, 3)), *LONG]


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """Collections look at what the test makes, not at what torch is made of."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def collecting(monkeypatch: pytest.MonkeyPatch, quick_collections: None) -> None:
    """Garbage is collected at every choice."""
    choose = Arbiter.choose

    def choosing(self: Arbiter) -> Any:
        gc.collect()
        return choose(self)

    monkeypatch.setattr(Arbiter, "choose", choosing)


SEEDS = [range(2), pytest.param(EVERY_SEED, marks=[pytest.mark.slow, pytest.mark.timeout(180)])]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(("chunks", "placement"), PLACED[1:3], ids=NAMES[1:3])
async def test_collecting_garbage_at_every_dispatch_drops_nothing(
    tmp_path: Path, collecting: None, chunks: int, placement: Any, seeds: range
) -> None:
    """Hazard 21: gc.collect() at every choice, tensors of 2 MB handed over and sent: parity."""
    torch.manual_seed(6)
    rows = 2 * 2**20 // 4 // 8
    stages = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)) for _ in range(4)]
    steps = [Step({0: (torch.randn(3 * rows, 8),)}, torch.randn(3 * rows, 8))]
    case = Case(stages, steps, microbatches=3, chunks=chunks, placement=placement)
    await assert_chunk_parity(case, tmp_path, seeds=seeds, orders_differ=False, send_most_s=0.02)


def _nothing() -> None:
    """What a device does between tasks."""


def _case(chunks: int, placement: Any, **options: Any) -> Case:
    options = {"return_outputs": False, **options}
    return Case(
        linear_stages(4), [], MICROBATCHES, options=options, chunks=chunks, placement=placement
    )


async def _steps(case: Case, count: int, *, evaluations: bool = True) -> list[Any]:
    """So many steps; by rank: live tensors after each (rank 0 counts), peaks."""
    topology = topology_of(case)
    together = asyncio.Barrier(topology.world_size)

    async def main(world: r.World) -> tuple[list[int], list[int]]:
        counts, peaks = [], []
        async with build(case, list(case.stages), world, None) as runtime:
            for _ in range(count):
                x, y = torch.randn(2, MICROBATCHES, 8).unbind()
                peaks.append((await runtime.train_step(x, target=y)).peak_in_flight)
                if evaluations:
                    await runtime.eval_step(x, target=y)
                del x, y
                await world.device.run(_nothing)  # its thread has left its last task's frame
                await together.wait()
                if world.rank == 0:
                    counts.append(live_tensors())
                await together.wait()
        return counts, peaks

    return await r.run_local(topology.world_size, main, topology=topology)


FLAT = [
    {"hint": "bf", "limit": 4},
    {"hint": "bfw-deep", "limit": 4},
    {"hint": "bf-deep", "activation_budget_bytes": 640},
]


@pytest.mark.parametrize("steps", [4, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", FLAT, ids=["bf", "bfw-deep", "budget"])
@pytest.mark.parametrize(("chunks", "placement"), [MOSTLY_LONG[0], LONG[1]])
async def test_memory_is_flat_over_many_steps(
    quick_collections: None, chunks: int, placement: Any, options: dict[str, Any], steps: int
) -> None:
    """Hazard 22: live tensors after every step the same, evaluations between."""
    case = _case(chunks, placement, **options)
    counts = (await _steps(case, steps))[0][0]
    assert set(counts[1:]) == {counts[1]}, f"live tensors by step: {counts}"


@pytest.mark.parametrize(
    "hint", ["bf", "bfw", *(pytest.param(h, marks=pytest.mark.slow) for h in ("bf-deep", "fb"))]
)
@pytest.mark.parametrize(("chunks", "placement"), MOSTLY_LONG)
@pytest.mark.parametrize("limit", [1, 3])
async def test_what_the_stages_of_a_rank_hold_stays_within_the_bound(
    monkeypatch: pytest.MonkeyPatch, hint: str, chunks: int, placement: Any, limit: int
) -> None:
    """The sum over a rank's stages after every forward is at most limit + chunks, and is D."""
    case = _case(chunks, placement, hint=hint, limit=limit)
    topology = topology_of(case)
    held = [0] * topology.num_stages
    most = [0] * topology.world_size
    forward, accumulating = Stage.forward, {"backward": Stage.backward}
    accumulating["backward_weight"] = Stage.backward_weight

    def noting(self: Stage, *args: Any) -> Any:
        outgoing = forward(self, *args)
        held[self.index] += 1
        rank = topology.rank_of(self.index)
        most[rank] = max(most[rank], sum(held[stage] for stage in topology.stages_of(rank)))
        assert self.open_microbatches == held[self.index]
        return outgoing

    def freeing(name: str) -> Any:
        def free(self: Stage, *args: Any) -> Any:
            outgoing = accumulating[name](self, *args)
            held[self.index] -= 1
            return outgoing

        return free

    monkeypatch.setattr(Stage, "forward", noting)
    for name in accumulating:
        monkeypatch.setattr(Stage, name, freeing(name))
    by_rank = await _steps(case, 1, evaluations=False)
    assert [peaks for _, peaks in by_rank] == [[peak] for peak in most]
    assert 0 < max(most) <= limit + chunks


@pytest.mark.parametrize(("chunks", "placement"), PLACED, ids=NAMES)
async def test_what_waits_for_a_stage_stays_within_the_bounds(
    monkeypatch: pytest.MonkeyPatch, chunks: int, placement: Any
) -> None:
    """DESIGN 6: at most the sending rank's bound of activations, its own rank's of gradients."""
    limit = 2
    case = _case(chunks, placement, limit=limit)
    waiting: list[int] = []
    for name in ("deliver_activation", "deliver_gradient"):
        deliver = getattr(Stage, name)

        def noting(self: Stage, *args: Any, deliver: Any = deliver) -> None:
            deliver(self, *args)
            waiting.append(self.waiting_arrivals)

        monkeypatch.setattr(Stage, name, noting)
    await _steps(case, 1, evaluations=False)
    assert 0 < max(waiting) <= 2 * (limit + chunks)

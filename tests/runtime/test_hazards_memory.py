"""HAZARDS.md 22: what a Runtime keeps, and for how long."""

import asyncio
import gc
from typing import Any

import pytest
import torch
from torch import nn

import rrfp_async as r
from rrfp_async.tasks.stage import Stage
from tests.runtime.conftest import Made, left_over_threads
from tests.runtime.parity import build, linear_stages
from tests.runtime.reference import Case

RANKS, MICROBATCHES = 3, 64


def live_tensors() -> int:
    """Tensors that anything still refers to."""
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def _nothing() -> None:
    """What a device does between tasks."""


async def _train(
    runtime: r.Runtime, world: r.World, steps: int, together: asyncio.Barrier
) -> tuple[list[int], list[r.StepResult]]:
    """So many steps; live tensors after each, counted on rank 0 while all others wait."""
    counts, results = [], []
    for _ in range(steps):
        x, y = torch.randn(MICROBATCHES, 8), torch.randn(MICROBATCHES, 8)
        last = world.rank == RANKS - 1
        args = (x,) if world.rank == 0 else ()
        result = await runtime.train_step(*args, target=y if last else None)
        results.append(result)
        del x, y, args, result
        await world.device.run(_nothing)  # the thread has left the frame of its last task
        await together.wait()
        if world.rank == 0:
            counts.append(live_tensors())
        await together.wait()
    return counts, results


def _case(limit: int) -> Case:
    options = {"limit": limit, "return_outputs": False}
    return Case(linear_stages(RANKS), [], MICROBATCHES, options=options)


def _watch_open(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Open microbatches of a stage, noted after each of its forwards."""
    seen: list[int] = []
    forward = Stage.forward

    def noting(self: Stage, *args: Any) -> Any:
        outgoing = forward(self, *args)
        seen.append(self.open_microbatches)
        return outgoing

    monkeypatch.setattr(Stage, "forward", noting)
    return seen


@pytest.fixture
def quick_collections(made: Made) -> Any:
    """Count what the test makes, not what torch is made of."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("steps", [10, pytest.param(50, marks=pytest.mark.slow)])
async def test_memory_is_flat_over_many_steps(
    steps: int, monkeypatch: pytest.MonkeyPatch, quick_collections: None
) -> None:
    """Hazard 22: M = 64 over many steps: live tensors flat, the peak set by the limit."""
    seen = _watch_open(monkeypatch)
    limit, case, together = 4, _case(4), asyncio.Barrier(RANKS)

    async def main(world: r.World) -> tuple[list[int], list[r.StepResult]]:
        async with build(case, list(case.stages), world, None) as runtime:
            return await _train(runtime, world, steps, together)

    by_rank = await r.run_local(RANKS, main)
    counts = by_rank[0][0]
    assert set(counts[1:]) == {counts[1]}, f"live tensors by step: {counts}"
    peak = max(result.peak_in_flight for _, results in by_rank for result in results)
    assert peak <= limit
    assert 0 < max(seen) <= peak


async def test_the_counter_sees_a_tensor_that_is_kept(quick_collections: None) -> None:
    """The test above can fail: one tensor more is one more counted."""
    before = live_tensors()
    kept = torch.ones(1)
    assert live_tensors() == before + 1
    del kept


@pytest.mark.parametrize("limit", [1, 3])
async def test_the_peak_is_what_the_stages_really_hold(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for it, rank 0 fills the limit: the reported peak is the stage's own."""
    seen = _watch_open(monkeypatch)
    case = _case(limit)

    async def main(world: r.World) -> r.StepResult:
        args = (torch.randn(MICROBATCHES, 8),) if world.rank == 0 else ()
        async with build(case, list(case.stages), world, None) as runtime:
            return await runtime.train_step(*args, target=torch.randn(MICROBATCHES, 8))

    results = await r.run_local(RANKS, main)
    assert max(result.peak_in_flight for result in results) == max(seen) == limit


async def test_outputs_are_kept_only_where_asked_for() -> None:
    """return_outputs=False keeps none in training; an evaluation always returns them."""
    case = _case(4)

    async def main(world: r.World) -> tuple[list[Any], list[Any]]:
        args = (torch.randn(MICROBATCHES, 8),) if world.rank == 0 else ()
        async with build(case, list(case.stages), world, None) as runtime:
            trained = await runtime.train_step(*args, target=torch.randn(MICROBATCHES, 8))
            evaluated = await runtime.eval_step(*args)
            return trained.outputs, evaluated.outputs

    outputs = await r.run_local(RANKS, main)
    assert [len(trained) for trained, _ in outputs] == [0, 0, 0]
    assert [len(evaluated) for _, evaluated in outputs] == [0, 0, MICROBATCHES]


async def test_a_model_is_free_once_its_runtime_is_closed(
    quick_collections: None, made: Made
) -> None:
    """Nothing of a closed Runtime or its world keeps a stage's parameters alive."""

    async def main(world: r.World) -> None:
        model = nn.Linear(8, 8)
        args = (torch.randn(8, 8),) if world.rank == 0 else ()
        config = r.Config(microbatches=2)
        loss_fn = nn.functional.mse_loss
        async with r.Runtime(model, world=world, config=config, loss_fn=loss_fn) as runtime:
            await runtime.train_step(*args, target=torch.randn(8, 8))

    async def run_and_forget() -> int:
        await r.run_local(2, main)
        made.stages.clear()
        assert left_over_threads(set()) == []  # a thread's last frame may hold the module
        return live_tensors()

    first = await run_and_forget()  # one tensor stays: the generator's state, a process's own
    assert await run_and_forget() == first

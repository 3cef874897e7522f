"""Calls that a Runtime's state does not allow, and ranks that leave: said on every rank."""

import asyncio
from typing import Any

import pytest
import torch
from torch import nn

import rrfp_async as r
from tests.runtime.steps import Call, assert_told, evaluate, mse_loss, run_steps, train, whole


async def test_a_step_after_close_is_refused() -> None:
    """A closed Runtime says so and what to do."""

    async def call(runtime: r.Runtime) -> Any:
        await runtime.close()
        return await runtime.train_step(whole(), target=whole())

    errors = await run_steps(call, call)
    assert {type(error) for error in errors} == {r.StateError}
    assert all("closed" in str(error) and "build a new one" in str(error) for error in errors)


async def test_a_step_before_opening_is_refused() -> None:
    """Without `async with` there are no connections: the message shows how."""
    async with r.local_world(1) as [world]:
        config = r.Config(microbatches=1)
        runtime = r.Runtime(nn.Linear(8, 8), world=world, config=config, loss_fn=mse_loss)
        with pytest.raises(r.StateError, match="async with Runtime"):
            await runtime.train_step(whole(), target=whole())


async def test_opening_twice_is_refused() -> None:
    """A Runtime is entered once."""
    async with r.local_world(1) as [world]:
        config = r.Config(microbatches=1)
        runtime = r.Runtime(nn.Linear(8, 8), world=world, config=config, loss_fn=mse_loss)
        async with runtime:
            with pytest.raises(r.StateError, match="opened before"):
                await runtime.__aenter__()
            await runtime.train_step(whole(), target=whole())


async def test_two_steps_at_once_on_one_runtime_are_refused() -> None:
    """The second is refused, the first ends well, and so does a third."""

    async def call(runtime: r.Runtime) -> Any:
        running = asyncio.create_task(runtime.train_step(whole(), target=whole()))
        await asyncio.sleep(0)
        with pytest.raises(r.StateError, match="await it first"):
            await runtime.train_step(whole(), target=whole())
        await running
        return await runtime.train_step(whole(), target=whole())

    results = await run_steps(call, call)
    assert [type(result) for result in results] == [r.StepResult] * 2


async def test_data_that_ends_too_early_is_told_everywhere() -> None:
    """An exhausted iterator is DataExhausted there, and StepFailed elsewhere."""

    async def call(runtime: r.Runtime) -> Any:
        await runtime.train_step()
        return await runtime.train_step()

    one, many = [(whole(), whole())], [(whole(), whole())] * 2
    errors = await run_steps(call, call, data=[one, many])
    assert_told(errors, 0, r.DataExhausted, "data= of rank 0 has no further batch")


@pytest.mark.parametrize("item", [3, (1,), (1, 2, 3)])
async def test_data_that_yields_no_pairs_is_told_everywhere(item: Any) -> None:
    """What came instead of (inputs, target) is named."""

    async def call(runtime: r.Runtime) -> Any:
        return await runtime.train_step()

    errors = await run_steps(call, call, data=[[item], [(whole(), whole())]])
    assert_told(errors, 0, ValueError, "yield (inputs, target)")


@pytest.mark.parametrize("leaver", [0, 1, 2])
async def test_a_rank_that_leaves_fails_the_next_step_of_the_others(leaver: int) -> None:
    """Who closes after a step is named in the next one, with the steps it took part in."""

    def calls(rank: int) -> Call:
        async def call(runtime: r.Runtime) -> Any:
            await train(runtime)
            return None if rank == leaver else await train(runtime)

        return call

    errors = await run_steps(*map(calls, range(3)))
    assert errors.pop(leaver) is None
    assert {(type(e), e.rank, e.step) for e in errors} == {(r.StepFailed, leaver, 1)}
    assert all("closed its Runtime with 1 steps done" in error.cause for error in errors)


async def test_a_rank_that_never_steps_but_leaves_fails_the_others() -> None:
    """A Runtime opened and closed without a step is named too."""

    async def leave(runtime: r.Runtime) -> None:
        """Nothing."""

    errors = await run_steps(train, leave, train)
    assert errors.pop(1) is None
    assert {(type(e), e.rank) for e in errors} == {(r.StepFailed, 1)}


async def test_a_trace_folder_that_cannot_be_made_ends_the_others(tmp_path: Any) -> None:
    """Opening fails on one rank, which leaves: the others' step fails naming it."""
    (tmp_path / "file").write_text("")
    bad, good = {"trace_dir": tmp_path / "file"}, {}
    errors = await run_steps(train, train, options=[good, bad])
    assert isinstance(errors[1], OSError)
    assert isinstance(errors[0], r.StepFailed)
    assert errors[0].rank == 1


async def test_a_failed_runtime_refuses_further_steps_and_says_why() -> None:
    """The refusal carries the failure it stems from."""

    async def call(runtime: r.Runtime) -> Any:
        with pytest.raises((ValueError, r.StepFailed)) as first:
            await runtime.train_step(torch.ones(3, 8), target=whole())
        with pytest.raises(r.StateError, match="takes no further steps") as second:
            await train(runtime)
        with pytest.raises(r.StateError):
            await evaluate(runtime)
        assert second.value.__cause__ is first.value
        return None

    assert await run_steps(call, call) == [None, None]

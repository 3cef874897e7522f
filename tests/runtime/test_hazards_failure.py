"""HAZARDS.md 18: an exception anywhere ends the step everywhere, with its first cause."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rrfp_async as r
from tests.machine import Kept, took
from tests.runtime.parity import build, chain_case, linear_stages
from tests.runtime.reference import Case
from tests.runtime.worlds import each_rank

RANKS = 3


class Faulty(nn.Module):
    """Raises in the forward, or lets the backward raise, of one microbatch."""

    def __init__(self, *, forward: int | None = None, backward: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._at = (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        number = int(x[0, -1])
        if number == self._at[0]:
            raise ArithmeticError("no forward today")
        output = self.linear(x)
        if number == self._at[1]:
            output.register_hook(_no_backward)
        output = output.clone()
        output[:, -1] = float(number)
        return output


def _no_backward(gradient: Tensor) -> Tensor:
    raise ArithmeticError("no backward today")


def _bad_loss(output: Tensor, target: Tensor) -> Tensor:
    if int(output[0, -1]) == 2:
        raise ArithmeticError("no loss today")
    return nn.functional.mse_loss(output, target)


def _numbered(count: int) -> Tensor:
    """A batch whose samples carry the number of their microbatch."""
    batch = torch.randn(count, 8)
    batch[:, -1] = torch.arange(count)
    return batch


def _stages(faulty_rank: int | None, **fault: int) -> list[nn.Module]:
    return [Faulty(**fault) if rank == faulty_rank else Faulty() for rank in range(RANKS)]


async def _two_steps(case: Case, world: r.World) -> tuple[BaseException, BaseException]:
    """What the first step and the next one raise."""
    async with build(case, list(case.stages), world, None) as runtime:
        errors = []
        for _ in range(2):
            args = (_numbered(4),) if world.rank == 0 else ()
            try:
                await runtime.train_step(*args, target=torch.randn(4, 8))
            except Exception as error:
                errors.append(error)
        first, second = errors
        return first, second


async def _fail(case: Case) -> list[tuple[BaseException, BaseException]]:
    begun = time.perf_counter()
    errors = await each_rank(RANKS, lambda world: _two_steps(case, world))
    assert time.perf_counter() - begun < 5.0
    return errors


def _assert_told(errors: list[Any], **where: Any) -> None:
    """Every rank raised StepFailed with these attributes, and refuses the next step."""
    for first, second in errors:
        assert isinstance(first, r.StepFailed), first
        assert {name: getattr(first, name) for name in where} == where
        assert isinstance(second, r.StateError)
        assert "failed" in str(second)
        assert second.__cause__ is first


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_an_exception_in_a_forward_names_its_place_everywhere(rank: int) -> None:
    """Hazard 18: in F of microbatch 2: rank, stage, task, microbatch and cause on all ranks."""
    errors = await _fail(Case(_stages(rank, forward=2), [], microbatches=4))
    cause = "ArithmeticError: no forward today"
    _assert_told(errors, rank=rank, stage=rank, task=f"{rank}F2", microbatch=2, cause=cause)
    assert isinstance(errors[rank][0].__cause__, ArithmeticError)


@pytest.mark.parametrize(("hint", "kind"), [("bf", "B"), ("auto", "I")])
@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_an_exception_in_a_backward_names_its_place_everywhere(
    rank: int, hint: str, kind: str
) -> None:
    """Hazard 18: in B or I of microbatch 1: rank, stage, task, microbatch, cause on all ranks."""
    case = Case(_stages(rank, backward=1), [], microbatches=4, options={"hint": hint})
    errors = await _fail(case)
    cause = "ArithmeticError: no backward today"
    _assert_told(errors, rank=rank, stage=rank, task=f"{rank}{kind}1", microbatch=1, cause=cause)


async def test_an_exception_in_the_loss_names_its_microbatch_everywhere() -> None:
    """Hazard 18: loss_fn of microbatch 2 fails as the forward of the last stage."""
    errors = await _fail(Case(_stages(None), [], microbatches=4, loss_fn=_bad_loss))
    where = {"rank": 2, "stage": 2, "task": "2F2", "microbatch": 2}
    _assert_told(errors, **where, cause="ArithmeticError: no loss today")


def _bad_data() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.randn(4, 8), torch.randn(4, 8)
    raise ArithmeticError("no data today")


@pytest.mark.parametrize("rank", [0, 2])
async def test_an_exception_in_the_data_names_its_rank_everywhere(rank: int) -> None:
    """Hazard 18: an iterator that fails in the second step: the rank and the cause."""
    stages = linear_stages(RANKS)

    async def main(world: r.World) -> Any:
        data = _bad_data() if world.rank == rank else iter([(torch.ones(4, 8),) * 2] * 2)
        config, loss_fn = r.Config(microbatches=2), nn.functional.mse_loss
        runtime = r.Runtime(
            stages[world.rank], world=world, config=config, loss_fn=loss_fn, data=data
        )
        async with runtime:
            await runtime.train_step()
            return await runtime.train_step()

    errors = await each_rank(RANKS, main)
    assert isinstance(errors[rank].__cause__, ArithmeticError)
    assert {(type(e), e.rank, e.step, e.cause) for e in errors} == {
        (r.StepFailed, rank, 1, "ArithmeticError: no data today")
    }


class BrokenOptimizer(torch.optim.SGD):
    """Raises in its step."""

    def step(self, closure: Any = None) -> None:
        raise ArithmeticError("no update today")


async def test_an_exception_in_the_optimizer_names_its_rank() -> None:
    """A failing update is a StepFailed there; the others learn of it at the latest in the next."""
    case = chain_case(RANKS, microbatches=2)

    async def main(world: r.World) -> None:
        make = BrokenOptimizer if world.rank == 1 else torch.optim.SGD
        config, loss_fn = r.Config(microbatches=2), nn.functional.mse_loss
        runtime = r.Runtime(
            case.stages[world.rank], world=world, config=config, loss_fn=loss_fn, optimizer=make
        )
        async with runtime:
            for _ in range(2):
                args = case.steps[0].inputs.get(world.rank, ())
                await runtime.train_step(*args, target=case.steps[0].target)

    errors = await each_rank(RANKS, main)
    assert {(type(e), e.rank, e.cause) for e in errors} == {
        (r.StepFailed, 1, "ArithmeticError: no update today")
    }
    assert isinstance(errors[1].__cause__, ArithmeticError)


async def test_an_exception_in_the_optimizer_names_its_step() -> None:
    """The update of step 0 belongs to step 0."""
    async with r.local_world(1) as [world]:
        config, loss_fn = r.Config(microbatches=2), nn.functional.mse_loss
        module, make = nn.Linear(8, 8), BrokenOptimizer
        async with r.Runtime(
            module, world=world, config=config, loss_fn=loss_fn, optimizer=make
        ) as runtime:
            with pytest.raises(r.StepFailed) as told:
                await runtime.train_step(torch.ones(4, 8), target=torch.ones(4, 8))
    assert told.value.step == 0


async def test_run_local_raises_the_first_cause_and_ends_the_others() -> None:
    """run_local raises the failed rank's own error, with the original as its cause."""
    case = Case(_stages(1, forward=2), [], microbatches=4)

    async def main(world: r.World) -> None:
        async with build(case, list(case.stages), world, None) as runtime:
            args = (_numbered(4),) if world.rank == 0 else ()
            await runtime.train_step(*args, target=torch.randn(4, 8))

    with pytest.raises(r.StepFailed, match=r"rank 1, stage 1, task 1F2, microbatch 2") as told:
        await r.run_local(RANKS, main)
    assert isinstance(told.value.__cause__, ArithmeticError)


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_cancelling_a_step_on_one_rank_ends_it_on_all(rank: int) -> None:
    """A cancelled train_step fails the others within a second; the Runtime refuses more."""
    case = chain_case(RANKS, microbatches=4)
    raised: dict[int, BaseException] = {}

    async def main(world: r.World) -> None:
        async with build(case, list(case.stages), world, None) as runtime:
            args = case.steps[0].inputs.get(world.rank, ())
            await runtime.train_step(*args, target=case.steps[0].target)
            here = asyncio.current_task()
            if world.rank == rank:
                asyncio.get_running_loop().call_soon(here.cancel)
            try:
                await runtime.train_step(*args, target=case.steps[0].target)
            except (Exception, asyncio.CancelledError) as error:
                raised[world.rank] = error
                if world.rank == rank:
                    here.uncancel()
            with pytest.raises(r.StateError, match="takes no further steps"):
                await runtime.train_step(*args, target=case.steps[0].target)

    with took() as running:
        assert await each_rank(RANKS, main) == [None] * RANKS
    assert running.own_s < 2.0
    assert isinstance(raised.pop(rank), asyncio.CancelledError)
    assert {(type(e), e.rank) for e in raised.values()} == {(r.StepFailed, rank)}


class Slow(nn.Module):
    """Computes for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.3)
        return self.linear(x)


@pytest.mark.parametrize("rank", [0, 1])
async def test_cancelling_while_a_task_computes_ends_within_a_second(rank: int) -> None:
    """A running task is not waited for: the others know at once, and buffers are empty."""
    stages = [Slow(), Slow()]
    case = Case(stages, [], microbatches=2)
    ends: dict[int, float] = {}

    async def main(world: r.World) -> None:
        async with build(case, stages, world, None) as runtime:
            args = (torch.randn(4, 8),) if world.rank == 0 else ()
            try:
                await runtime.train_step(*args, target=torch.randn(4, 8))
            finally:
                ends[world.rank] = time.perf_counter()

    async with r.local_world(2) as worlds:
        tasks = [asyncio.create_task(main(world)) for world in worlds]
        await asyncio.sleep(0.1)
        kept, cancelled = Kept(), time.perf_counter()
        tasks[rank].cancel()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        kept_s = kept.so_far_s()
    assert isinstance(errors[rank], asyncio.CancelledError)
    assert isinstance(errors[1 - rank], r.StepFailed)
    assert max(ends.values()) - cancelled - kept_s < 1.0


async def test_closing_during_a_step_ends_it_on_every_rank() -> None:
    """A Runtime closed under its own running step fails that step, here and elsewhere."""
    case = Case([Slow(), Slow()], [], microbatches=2)

    async def main(world: r.World) -> None:
        async with build(case, list(case.stages), world, None) as runtime:
            args = (torch.randn(4, 8),) if world.rank == 0 else ()
            step = asyncio.create_task(runtime.train_step(*args, target=torch.randn(4, 8)))
            if world.rank == 1:
                await asyncio.sleep(0.1)
                await runtime.close()
            await step

    errors = await each_rank(2, main)
    assert [type(error) for error in errors] == [r.StepFailed] * 2
    assert [error.rank for error in errors] == [1, 1]

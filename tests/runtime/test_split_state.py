"""What the split leaves behind: errors that name their task, layers as they were, memory."""

import asyncio
import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import rrfp_async as r
from rrfp_async.ids import Edge
from rrfp_async.tasks.boundary import Activation
from rrfp_async.tasks.stage import Stage, StageInputs
from tests.runtime.parity import build, chain_case, linear_stages
from tests.runtime.reference import Case
from tests.runtime.test_hazards_memory import live_tensors
from tests.runtime.worlds import each_rank

RANKS = 3
BFW = {"hint": "bfw"}
ZB_H1 = {"hint": "zb-h1", "binding": True}


@pytest.fixture(params=[BFW, ZB_H1], ids=["bfw", "zb-h1 binding"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The hint, and whether it is law."""
    return request.param


# -- errors ------------------------------------------------------------------------------------


class FailsInBackward(nn.Module):
    """Its layer's backward raises for one microbatch, told by its samples' last value."""

    def __init__(self, microbatch: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.microbatch = microbatch

    def forward(self, x: Tensor) -> Tensor:
        number = int(x[0, -1])
        output = self.linear(x)
        if number == self.microbatch:
            output.register_hook(_no_backward)
        output = output.clone()
        output[:, -1] = float(number)
        return output


def _no_backward(gradient: Tensor) -> Tensor:
    raise ArithmeticError("no backward today")


def _numbered(count: int) -> Tensor:
    batch = torch.randn(count, 8)
    batch[:, -1] = torch.arange(count)
    return batch


async def _failing(stages: list[nn.Module], options: dict[str, Any]) -> list[Any]:
    case = Case(stages, [], microbatches=4, options=options)

    async def main(world: r.World) -> None:
        async with build(case, stages, world, None) as runtime:
            args = (_numbered(4),) if world.rank == 0 else ()
            await runtime.train_step(*args, target=torch.randn(4, 8))

    async with asyncio.timeout(10.0):
        return await each_rank(RANKS, main)


def _assert_named(errors: list[Any], **where: Any) -> None:
    for error in errors:
        assert isinstance(error, r.StepFailed), error
        assert {name: getattr(error, name) for name in where} == where


def _assert_own_forwards(stages: list[nn.Module]) -> None:
    layers = [part for stage in stages for part in stage.modules() if type(part) is nn.Linear]
    assert layers
    assert [layer for layer in layers if "forward" in layer.__dict__] == []


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_an_exception_in_i_names_its_task_everywhere(
    options: dict[str, Any], rank: int
) -> None:
    """I of microbatch 1: StepFailed with rank, stage, task, microbatch and cause; layers whole."""
    stages = [FailsInBackward(1 if index == rank else None) for index in range(RANKS)]
    errors = await _failing(stages, options)
    cause = "ArithmeticError: no backward today"
    _assert_named(errors, rank=rank, stage=rank, task=f"{rank}I1", microbatch=1, cause=cause)
    assert isinstance(errors[rank].__cause__, ArithmeticError)
    _assert_own_forwards(stages)


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_an_exception_in_w_names_its_task_everywhere(
    options: dict[str, Any], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W of microbatch 2: the same."""
    backward_weight = Stage.backward_weight

    def failing(self: Stage, microbatch: int) -> Any:
        if (self.index, microbatch) == (rank, 2):
            raise ArithmeticError("no weights today")
        return backward_weight(self, microbatch)

    monkeypatch.setattr(Stage, "backward_weight", failing)
    stages = [FailsInBackward() for _ in range(RANKS)]
    errors = await _failing(stages, options)
    cause = "ArithmeticError: no weights today"
    _assert_named(errors, rank=rank, stage=rank, task=f"{rank}W2", microbatch=2, cause=cause)
    _assert_own_forwards(stages)


async def test_an_exception_in_f_leaves_the_layers_whole(options: dict[str, Any]) -> None:
    """A failed step of any kind gives the layers their own forward again."""
    stages = linear_stages(RANKS)
    stages[1] = nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 8))
    errors = await _failing(stages, options)
    _assert_named(errors, rank=1, stage=1, task="1F0")
    _assert_own_forwards(stages)


# -- between steps -----------------------------------------------------------------------------


async def test_a_stage_between_steps_is_as_it_was(options: dict[str, Any]) -> None:
    """Its layers run their own forward; it can be copied and pickled, gradients and all."""
    case = chain_case(RANKS, microbatches=4)
    case = replace(case, options=options)
    stages = copy.deepcopy(list(case.stages))

    async def main(world: r.World) -> None:
        module = stages[world.rank]
        async with build(case, stages, world, None) as runtime:
            for _ in range(3):
                args = case.steps[0].inputs.get(world.rank, ())
                await runtime.train_step(*args, target=case.steps[0].target)
                _assert_own_forwards([module])
                for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
                    _assert_equal(other, module)
                await runtime.eval_step(*args, target=case.steps[0].target)
                _assert_own_forwards([module])

    await r.run_local(RANKS, main)


def _assert_equal(other: nn.Module, module: nn.Module) -> None:
    x = torch.randn(4, 8)
    assert torch.equal(other(x), module(x))
    for copied, parameter in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(copied, parameter)
        assert copied.grad is None or torch.equal(copied.grad, parameter.grad)


async def test_a_layers_own_forward_is_kept(options: dict[str, Any]) -> None:
    """A layer that was given another forward by its user keeps it."""
    stages = linear_stages(RANKS)
    calls: list[int] = []
    for index, stage in enumerate(stages):
        own = stage[0].forward

        def counting(x: Tensor, index: int = index, own: Any = own) -> Tensor:
            calls.append(index)
            return own(x)

        stage[0].forward = counting
    given = [stage[0].__dict__["forward"] for stage in stages]
    case = Case(stages, [], microbatches=4, options=options)

    async def main(world: r.World) -> None:
        async with build(case, stages, world, None) as runtime:
            args = (torch.randn(4, 8),) if world.rank == 0 else ()
            await runtime.train_step(*args, target=torch.randn(4, 8))

    await r.run_local(RANKS, main)
    assert [stage[0].__dict__["forward"] for stage in stages] == given
    assert sorted(calls) == sorted([0, 1, 2] * 4)


# -- memory ------------------------------------------------------------------------------------


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """Count what the test makes, not what torch is made of."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def _nothing() -> None:
    """What a device does between tasks."""


def _watch_open(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Open microbatches of a stage, noted after each of its forwards and I's."""
    seen: list[int] = []

    def noted(inner: Callable[..., Any]) -> Callable[..., Any]:
        def noting(self: Stage, *args: Any) -> Any:
            outgoing = inner(self, *args)
            seen.append(self.open_microbatches)
            return outgoing

        return noting

    for name in ("forward", "backward_input"):
        monkeypatch.setattr(Stage, name, noted(getattr(Stage, name)))
    return seen


@pytest.mark.parametrize(
    ("steps", "microbatches"), [(6, 16), pytest.param(50, 64, marks=pytest.mark.slow)]
)
async def test_memory_is_flat_over_many_steps(
    steps: int,
    microbatches: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    quick_collections: None,
) -> None:
    """Hazard 22: live tensors flat over the steps; the peak, which counts to W, within bounds."""
    seen = _watch_open(monkeypatch)
    together = asyncio.Barrier(RANKS)
    limit = {"limit": 4} if options is BFW else {}
    case = Case(
        linear_stages(RANKS),
        [],
        microbatches,
        options={**options, **limit, "return_outputs": False},
    )

    async def main(world: r.World) -> tuple[list[int], int]:
        counts, peak = [], 0
        async with build(case, list(case.stages), world, None) as runtime:
            for _ in range(steps):
                args = (torch.randn(microbatches, 8),) if world.rank == 0 else ()
                result = await runtime.train_step(*args, target=torch.randn(microbatches, 8))
                peak = max(peak, result.peak_in_flight)
                del args, result
                await world.device.run(_nothing)  # the thread has left its last task's frame
                await together.wait()
                if world.rank == 0:
                    counts.append(live_tensors())
                await together.wait()
        return counts, peak

    by_rank = await r.run_local(RANKS, main)
    counts = by_rank[0][0]
    assert set(counts[1:]) == {counts[1]}, f"live tensors by step: {counts}"
    peaks = [peak for _, peak in by_rank]
    assert max(peaks) == max(seen)
    assert max(peaks) <= (4 if options is BFW else RANKS)


class _Box:
    """What autograd saved, as long as it does."""

    alive = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        _Box.alive += 1

    def __del__(self) -> None:
        _Box.alive -= 1


def _stage() -> Stage:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
    return Stage(1, module, r.Topology(3), None, split=True)


def _forward(stage: Stage, microbatch: int) -> list[Tensor]:
    x = torch.randn(4, 8)
    stage.deliver_activation(Edge(0, 1), microbatch, Activation([x]), [True])
    with saved_tensors_hooks(_Box, lambda box: box.tensor):
        [sent] = stage.forward(microbatch, stage.take_activations(microbatch), torch.clone)
    return [torch.ones_like(tensor) for tensor in sent.tensors]


def test_after_i_only_the_operands_of_w_are_kept() -> None:
    """I frees the graph, at once and without a collection; W frees the rest."""
    stage = _stage()
    inputs = StageInputs(training=True, zero_gradients=True, sizes=(1, 1))
    gc.collect()
    gc.disable()
    try:
        before = live_tensors_now()
        stage.begin_step(inputs)
        for microbatch in (0, 1):
            gradients: Any = [_forward(stage, microbatch)]
            assert _Box.alive > 0
            stage.backward_input(microbatch, gradients, torch.clone)
            del gradients
            assert _Box.alive == 0, "I left its graph alive"
        assert stage.open_microbatches == 2
        held = live_tensors_now() - before
        operands = 2 * 3 + 2  # x, dY and the bias's gradient of two layers; the norm's gradients
        assert held <= 2 * operands, f"{held} tensors are held for two microbatches"
        for microbatch in (0, 1):
            stage.backward_weight(microbatch)
        made = sum(1 for _ in stage.module.parameters())
        assert live_tensors_now() - before == made, "more is alive than the gradients"
        stage.end_step()
    finally:
        gc.enable()


def live_tensors_now() -> int:
    """Tensors that anything still refers to, garbage included."""
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

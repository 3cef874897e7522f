"""HAZARDS.md, one stage a rank: late arrivals, late ranks, and the event loop meanwhile."""

import asyncio
import copy
import time
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import nn

import rrfp_async as r
from rrfp_async.arbiter import Arbiter, Decision
from rrfp_async.ids import Link
from tests.machine import Ticker, kept_between
from tests.runtime.parity import (
    build,
    chain_case,
    differences,
    pipelined,
    records_of,
)
from tests.runtime.reference import Case, Step, run_reference
from tests.runtime.worlds import each_rank, gated

FIRST_ACTIVATION = (Link(0, 1), 0)


def _large_case() -> Case:
    """Two ranks, four microbatches whose activations are 4 MB each."""
    torch.manual_seed(20)
    rows = 4 * 2**20 // 4 // 8
    stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    steps = [Step({0: (torch.randn(4 * rows, 8),)}, torch.randn(4 * rows, 8))]
    return Case(stages, steps, microbatches=4, options={"hint": "bf", "limit": 8})


async def _released(gate: asyncio.Event, reached: asyncio.Event) -> None:
    await reached.wait()
    gate.set()


async def test_ready_tasks_run_while_an_activation_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard 10: with microbatch 0 held back, rank 1 runs F1, F2 and F3 first; parity."""
    gate, reached = asyncio.Event(), asyncio.Event()
    _signal_after(monkeypatch, "1F3", reached)
    case = _large_case()

    def wrap(world: r.World) -> r.World:
        return gated(world, gate, lambda *which: which == FIRST_ACTIVATION)

    async with asyncio.TaskGroup() as group:
        group.create_task(_released(gate, reached))
        run = await pipelined(case, tmp_path, wrap=wrap)
    assert differences(run_reference(case), run.outcomes) == []
    assert run.orders[1][:4] == ["1F1", "1F2", "1F3", "1F0"]
    assert run.orders[1][4:] == ["1B0", "1B1", "1B2", "1B3"]


async def test_the_log_shows_what_a_late_activation_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard 10: the records name the task that was passed over while others ran."""
    gate, reached = asyncio.Event(), asyncio.Event()
    _signal_after(monkeypatch, "1F3", reached)
    case = chain_case(2, microbatches=4, options={"hint": "f-priority", "limit": 8})

    def wrap(world: r.World) -> r.World:
        return gated(world, gate, lambda *which: which == FIRST_ACTIVATION)

    async with asyncio.TaskGroup() as group:
        group.create_task(_released(gate, reached))
        await pipelined(case, tmp_path, wrap=wrap)
    first, *_ = records_of(tmp_path, 1)
    assert (first["task"], first["passed_over"]) == ("1F1", ["1F0"])
    assert "not ready" in first["reason"]


def _signal_after(monkeypatch: pytest.MonkeyPatch, task: str, event: asyncio.Event) -> None:
    """Set `event` when a task of that name is committed."""
    commit = Arbiter.commit

    def noting(self: Arbiter, decision: Decision) -> None:
        commit(self, decision)
        if str(decision.task) == task:
            event.set()

    monkeypatch.setattr(Arbiter, "commit", noting)


class Busy(nn.Module):
    """Keeps the interpreter busy for a while, as a module with much Python in it does."""

    def __init__(self, busy_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.busy_s = busy_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        until = time.perf_counter() + self.busy_s
        while time.perf_counter() < until:
            pass
        return self.linear(x)


class Late:
    """A step of two ranks whose first activation begins `late_s` after its header, and a ticker."""

    def __init__(self, case: Case, late_s: float) -> None:
        self.results: list[r.StepResult] = []
        self.ticker = Ticker()
        self.held_s = self.released_s = self.ended_s = 0.0
        self._case = case
        self._late_s = late_s
        self._gate = asyncio.Event()
        self._stages = copy.deepcopy(list(case.stages))

    async def run(self) -> None:
        async with self.ticker:
            self.results = await r.run_local(2, self._main)

    def kept_s(self, begin_s: float, end_s: float) -> float:
        """What the machine kept from us meanwhile."""
        return kept_between(self.ticker.ticks, begin_s, end_s)

    async def _main(self, world: r.World) -> r.StepResult:
        async with build(
            self._case, self._stages, gated(world, self._gate, self._holds), None
        ) as runtime:
            step = self._case.steps[0]
            args = step.inputs.get(world.rank, ())
            result = await runtime.train_step(*args, target=step.target)
            self.ended_s = time.monotonic()
            return result

    def _holds(self, *which: Any) -> bool:
        if which == FIRST_ACTIVATION:
            self.held_s = time.monotonic()
            asyncio.get_running_loop().call_later(self._late_s, self._release)
        return which == FIRST_ACTIVATION

    def _release(self) -> None:
        self.released_s = time.monotonic()
        self._gate.set()


@pytest.mark.parametrize("late_s", [0.3, pytest.param(2.0, marks=pytest.mark.slow)])
async def test_a_late_receive_leaves_the_loop_free_and_ends_soon(late_s: float) -> None:
    """Hazard 20: a receive that is late resolves within 0.1 s of its data; no gap over 50 ms."""
    await r.run_local(2, _warm_up)
    late = Late(chain_case(2, microbatches=2), late_s)
    await late.run()
    begun_s, held_s, ended_s = late.released_s, late.held_s, late.ended_s
    assert ended_s - begun_s - late.kept_s(begun_s, ended_s) < 0.1
    assert mean(late.ticker.gaps) < 0.02
    assert max(late.ticker.gaps) < 0.05
    assert late.results[1].blocking_s > late_s * 0.9 - late.kept_s(held_s, begun_s)


def test_computation_in_python_leaves_the_loop_free() -> None:
    """Hazard 20's like: under `run`, stages busy in the interpreter cause no gap over 50 ms."""
    case = chain_case(2, microbatches=2, stages=[Busy(0.1), Busy(0.1)])

    async def main() -> list[float]:
        await r.run_local(2, _warm_up)
        late = Late(case, 0.05)
        await late.run()
        return late.ticker.gaps

    assert max(r.run(main)) < 0.05


async def _warm_up(world: r.World) -> None:
    """A first step: torch loads what it needs."""
    case = chain_case(2, microbatches=2)
    async with build(case, list(case.stages), world, None) as runtime:
        await runtime.train_step(*case.steps[0].inputs.get(world.rank, ()), target=torch.ones(8, 8))


@pytest.mark.parametrize("late_s", [0.5, pytest.param(3.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("late_rank", [0, 1])
async def test_a_rank_that_starts_late_misses_nothing(late_rank: int, late_s: float) -> None:
    """Hazard 24: P = 2, one rank builds its Runtime late: no message lost, parity."""
    case = chain_case(2, microbatches=4)
    stages = copy.deepcopy(list(case.stages))

    async def main(world: r.World) -> float | None:
        if world.rank == late_rank:
            await asyncio.sleep(late_s)
        async with build(case, stages, world, None) as runtime:
            args = case.steps[0].inputs.get(world.rank, ())
            return (await runtime.train_step(*args, target=case.steps[0].target)).loss

    begun = time.perf_counter()
    losses = await each_rank(2, main)
    assert time.perf_counter() - begun >= late_s
    [expected] = run_reference(case)
    assert losses == [expected.loss] * 2
    for stage, reference in zip(stages, _gradients(expected.gradients), strict=True):
        assert all(
            torch.equal(p.grad, g) for p, g in zip(stage.parameters(), reference, strict=True)
        )


def _gradients(by_name: dict[str, Any]) -> list[list[torch.Tensor]]:
    return [[g for name, g in by_name.items() if name.startswith(f"stage {i} ")] for i in (0, 1)]


def _program(case: Case) -> Any:
    """A user's coroutine that trains one step on two ranks."""
    stages = copy.deepcopy(list(case.stages))

    async def main(world: r.World) -> float | None:
        async with build(case, stages, world, None) as runtime:
            args = case.steps[0].inputs.get(world.rank, ())
            return (await runtime.train_step(*args, target=case.steps[0].target)).loss

    return r.run_local(2, main)


def test_a_plain_asyncio_run_trains() -> None:
    """Hazard 28: a program with asyncio.run instead of rrfp_async.run works."""
    case = chain_case(2, microbatches=4)
    assert asyncio.run(_program(case)) == [run_reference(case)[0].loss] * 2


def test_rrfp_run_trains_on_uvloop() -> None:
    """`rrfp_async.run` takes a coroutine or a function, and gives the same."""
    case = chain_case(2, microbatches=4)
    expected = [run_reference(case)[0].loss] * 2
    assert r.run(_program(case)) == expected
    assert r.run(lambda: _program(case)) == expected


async def test_a_running_loop_trains_by_awaiting() -> None:
    """Hazard 28: in a loop that runs already (a notebook), cell after cell, it is an await."""
    assert isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop)
    case = chain_case(2, microbatches=4)
    for _ in range(2):
        assert await _program(case) == [run_reference(case)[0].loss] * 2


async def test_a_runtime_lives_from_cell_to_cell() -> None:
    """Hazard 28: worlds and Runtimes entered by hand, steps awaited one by one, closed by hand."""
    case = chain_case(2, microbatches=4)
    context = r.local_world(2)
    worlds = await context.__aenter__()
    runtimes = [build(case, list(case.stages), world, None) for world in worlds]
    for runtime in runtimes:
        await runtime.__aenter__()
    (x,), y = case.steps[0].inputs[0], case.steps[0].target
    for _ in range(2):
        first, second = (runtimes[0].train_step(x), runtimes[1].train_step(target=y))
        results = await asyncio.gather(first, second)
        assert [result.loss for result in results] == [run_reference(case)[0].loss] * 2
    for runtime in runtimes:
        await runtime.close()
    await context.__aexit__(None, None, None)

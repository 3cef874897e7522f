"""The first cause wins, whatever else comes in while a step is ending."""

import asyncio
import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rrfp_async as r
from rrfp_async.bus.base import Bus
from rrfp_async.bus.messages import Header, Message
from rrfp_async.world import Wires
from tests.runtime.worlds import GatedTransfer, WatchedBus, each_rank, rewired

HOPS_MOST = 8
"""Turns of the loop between a failure and a late header that are tried."""


class HoldingBus(WatchedBus):
    """Keeps the header of microbatch 2 until it is told to let go."""

    def __init__(self, inner: Bus, held: threading.Event) -> None:
        super().__init__(inner)
        self._held = held
        self._kept: list[tuple[int, Message]] = []

    def send_nowait(self, target: int, message: Message) -> None:
        if isinstance(message, Header) and message.task.microbatch == 2:
            self._kept.append((target, message))
            self._held.set()
        else:
            super().send_nowait(target, message)

    def let_go(self, hops: int) -> None:
        """Send what was kept after so many turns of the loop."""
        if hops:
            asyncio.get_running_loop().call_soon(self.let_go, hops - 1)
            return
        for target, message in self._kept:
            super().send_nowait(target, message)


class FailsWithALateHeader(nn.Module):
    """Raises in its first forward, when the next header is a few turns away."""

    def __init__(self, loop: asyncio.AbstractEventLoop, hops: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.held = threading.Event()
        self.buses: list[HoldingBus] = []
        self._loop, self._hops = loop, hops

    def forward(self, x: Tensor) -> Tensor:
        assert self.held.wait(5.0)
        self._loop.call_soon_threadsafe(self.buses[0].let_go, self._hops)
        raise ArithmeticError("no forward today")


@pytest.fixture
def told_warnings() -> Iterator[list[Any]]:
    """What was warned of, coroutines that nobody awaited included."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield told
        gc.collect()


async def _fail(hops: int) -> list[Any]:
    faulty = FailsWithALateHeader(asyncio.get_running_loop(), hops)
    stages = [nn.Linear(8, 8), faulty]

    def holding(wires: Wires) -> Wires:
        faulty.buses.append(HoldingBus(wires.bus, faulty.held))
        gate = asyncio.Event()  # never set: a receive of microbatch 1 is open to the end
        transfer = GatedTransfer(wires.transfer, lambda _, number: number == 1, gate)
        return Wires(faulty.buses[0], transfer)

    async def main(world: r.World) -> None:
        world = rewired(world, holding) if world.rank == 0 else world
        config, loss_fn = r.Config(microbatches=3), nn.functional.mse_loss
        module = stages[world.rank]
        async with r.Runtime(module, world=world, config=config, loss_fn=loss_fn) as runtime:
            args = (torch.randn(4, 8),) if world.rank == 0 else ()
            await runtime.train_step(*args, target=torch.randn(4, 8))

    return await each_rank(2, main)


async def test_a_header_that_comes_after_a_failure_does_not_hide_it(
    told_warnings: list[Any],
) -> None:
    """However late a header comes, both ranks name the task and the exception that came first."""
    causes: dict[int, set[str]] = {}
    for hops in range(HOPS_MOST):
        errors = await _fail(hops)
        assert {type(error) for error in errors} == {r.StepFailed}
        causes[hops] = {f"{error.task}: {error.cause}" for error in errors}
    gc.collect()
    expected = {"1F0: ArithmeticError: no forward today"}
    assert {hops: seen for hops, seen in causes.items() if seen != expected} == {}
    assert [str(warning.message) for warning in told_warnings] == []

"""A control connection between two hosts is cut in the middle of training: both ranks say so.

Both ranks run in this process, on one loop, with sockets and gloo between them as under torchrun;
control messages pass proxies that cut them off.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import rrfp_async as r
from rrfp_async import torchrun
from rrfp_async.bus.directory import Directory
from rrfp_async.gpu.device import CpuDevice
from tests.bus.proxy import Proxy
from tests.bus.sockets import Rewriting

PEER_TIMEOUT_S = 2.0
GRACE_S = 5.0
STEPS_BEFORE = 3


@dataclass
class Job:
    """Two ranks that train until a step fails, and the proxies between them."""

    forth: Proxy
    back: Proxy
    leave_open: bool
    trained: list[list[float]] = field(default_factory=lambda: [[], []])
    failed: dict[int, BaseException] = field(default_factory=dict)

    async def train(self, world: r.World) -> None:
        """Steps until one fails; the Runtime is then closed, or left open until cancelled."""
        rank, inputs = world.rank, torch.ones(8, 8)
        torch.manual_seed(rank)
        config = r.Config(microbatches=4, peer_timeout_s=PEER_TIMEOUT_S, stall_timeout_s=60.0)
        runtime = r.Runtime(
            torch.nn.Linear(8, 8), world=world, config=config, loss_fn=torch.nn.functional.mse_loss
        )
        async with world, runtime:
            try:
                while True:
                    self.trained[rank].append(
                        (await runtime.train_step(inputs, target=inputs)).loss
                    )
            except r.RrfpError as error:
                self.failed[rank] = error
            if self.leave_open:
                await asyncio.sleep(3600)

    async def under_way(self) -> None:
        """Wait until both ranks have finished some steps."""
        await _until(lambda: min(map(len, self.trained)) >= STEPS_BEFORE, within_s=20.0)

    async def both_failed(self) -> None:
        """Wait until both ranks have failed: within the peer timeout and a little."""
        await _until(lambda: len(self.failed) == 2, within_s=PEER_TIMEOUT_S + GRACE_S)
        for error in self.failed.values():
            assert isinstance(error, r.StepFailed)
            assert "rank 0" in str(error)
            assert "rank 1" in str(error)


async def _until(holds: Callable[[], bool], *, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 - across two programs
            await asyncio.sleep(0.01)


def _world(rank: int, store: Any) -> r.World:
    """As `torchrun_world` makes it, on a host of its own as far as control messages know."""
    launch = torchrun.Launch(rank, 2, 0, 2, rank, ("127.0.0.1", 0), 0)
    device = CpuDevice(time.perf_counter, name=f"rrfp-compute-{rank}")
    wiring = torchrun._Wiring(launch, r.Topology(2), store, device.torch_device)
    return r.World(rank, r.Topology(2), device, time.perf_counter, wiring.connect, store)


@contextlib.asynccontextmanager
async def _job(*, leave_open: bool = False) -> AsyncIterator[Job]:
    store = dist.HashStore()
    async with Proxy() as forth, Proxy() as back:
        ways = {0: {1: forth.towards}, 1: {0: back.towards}}

        def directory(prefixed: Any, *, rank: int, **options: Any) -> Directory:
            return Directory(Rewriting(prefixed, ways[rank]), rank=rank, **options)

        with patch.object(torchrun, "Directory", directory):
            job = Job(forth, back, leave_open)
            ranks = [asyncio.create_task(job.train(_world(rank, store))) for rank in (0, 1)]
            try:
                yield job
            finally:
                for rank in ranks:
                    rank.cancel()
                await asyncio.gather(*ranks, return_exceptions=True)


def _cut_both(job: Job) -> None:
    job.forth.cut()
    job.back.cut()


def _cut_one(job: Job) -> None:
    job.forth.cut()


def _silence_both(job: Job) -> None:
    job.forth.fall_silent()
    job.back.fall_silent()


def _silence_one(job: Job) -> None:
    job.back.fall_silent()


BREAKS: dict[str, Callable[[Job], None]] = {
    "both ways": _cut_both,
    "one way": _cut_one,
    "silent both ways": _silence_both,
    "silent one way": _silence_one,
}
SAMPLED = ("both ways", "one way")
CASES = [pytest.param(name, marks=[] if name in SAMPLED else [pytest.mark.slow]) for name in BREAKS]


@pytest.mark.parametrize("name", CASES)
async def test_a_cut_connection_fails_the_step_on_both_ranks_naming_the_pair(name: str) -> None:
    """Within the peer timeout; both had the same losses so far, and nobody connects again."""
    async with _job() as job:
        await job.under_way()
        BREAKS[name](job)
        await job.both_failed()
        assert (job.forth.connections, job.back.connections) == (1, 1)
    done = min(map(len, job.trained))
    assert job.trained[0][:done] == job.trained[1][:done]
    assert abs(len(job.trained[0]) - len(job.trained[1])) <= 1


@pytest.mark.parametrize(
    "name", ["one way", pytest.param("silent one way", marks=pytest.mark.slow)]
)
async def test_both_ranks_hear_of_a_cut_though_neither_closes(name: str) -> None:
    """Who heard first keeps its Runtime open, as a program that writes a checkpoint does."""
    async with _job(leave_open=True) as job:
        await job.under_way()
        BREAKS[name](job)
        await job.both_failed()

"""A step whose first rank says nothing: blocked in its data, or with its loop held up."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import rrfp_async as r
from rrfp_async.bus.inproc import InprocHub
from rrfp_async.bus.messages import Progress, StepBegin
from rrfp_async.session import Session

STALL_S = 0.4


async def test_a_data_iterator_that_blocks_fails_the_step_on_every_rank() -> None:
    """Loading is part of the step: it hears the others and is bounded by the stall timeout."""
    release = threading.Event()

    def blocking() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        release.wait(30.0)
        yield torch.ones(2, 4), torch.ones(2, 4)

    async def main(world: r.World) -> None:
        config = r.Config(microbatches=2, stall_timeout_s=STALL_S)
        data = blocking() if world.rank == 0 else iter([(None, torch.ones(2, 4))])
        loss_fn = nn.functional.mse_loss
        module = nn.Linear(4, 4)
        async with r.Runtime(
            module, world=world, config=config, loss_fn=loss_fn, data=data
        ) as runtime:
            await runtime.train_step()

    begun = time.monotonic()
    async with r.local_world(2) as worlds:
        errors = await asyncio.gather(*map(main, worlds), return_exceptions=True)
    release.set()
    assert [type(error) for error in errors] == [r.StepFailed, r.StepFailed]
    assert time.monotonic() - begun < 10 * STALL_S


async def test_a_first_rank_that_is_silent_in_a_step_is_given_up_by_the_others() -> None:
    """Heard from time to time it may take its time; silent for twice the timeout it may not."""
    now_s = 0.0
    bus = InprocHub(2).open(1)
    session = Session(
        bus=bus,
        rank=1,
        topology=r.Topology(2),
        settings=(),
        clock=lambda: now_s,
        stall_timeout_s=10.0,
    )
    session.open_step(training=True, update=True)
    session.handle(0, StepBegin(0, training=True, update=True, seed=0, sizes=(1,)))
    for _ in range(5):
        now_s += 15.0
        session.report_progress(1, "")
        session.handle(0, Progress(0, 7, "waits for 1B0"))
    now_s += 21.0
    with pytest.raises(r.StepFailed, match=r"rank 0: it has not said anything in the step"):
        session.report_progress(1, "")
    bus.close()

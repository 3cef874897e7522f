"""What a cancelled close still closes."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import rrfp_async as r
from rrfp_async.closing import surely


async def test_a_cancelled_wait_does_not_cancel_the_close() -> None:
    """Cancelled before a thread was free for it, the close happens all the same."""
    free, closed = threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = loop.run_in_executor(None, free.wait, 10.0)
    closing = asyncio.create_task(surely(closed.set))
    await asyncio.sleep(0.01)
    closing.cancel()
    assert isinstance((await asyncio.gather(closing, return_exceptions=True))[0], BaseException)
    assert not closed.is_set()
    free.set()
    await busy
    assert await asyncio.to_thread(closed.wait, 5.0)


async def test_a_runtime_that_is_cancelled_as_it_closes_ends_its_trace(tmp_path: Path) -> None:
    """The neighbour's failure cancels a rank that is closing; its writer's thread ends."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    free = threading.Event()
    async with r.local_world(1) as worlds:
        config = r.Config(microbatches=1, trace_dir=tmp_path)
        runtime = r.Runtime(torch.nn.Linear(2, 2), world=worlds[0], config=config)
        await runtime.__aenter__()
        busy = loop.run_in_executor(None, free.wait, 10.0)
        closing = asyncio.create_task(runtime.close())
        await asyncio.sleep(0.01)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        free.set()
        await busy
    # tests/runtime/conftest.py finds a thread that stays

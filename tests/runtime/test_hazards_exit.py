"""HAZARDS.md 25: however a program ends, its process ends within five seconds."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ENDS_WITHIN_S = 5.0

PREAMBLE = """
import asyncio, os, signal, sys, threading, time
import torch
import rrfp_async as r
torch.set_num_threads(1)
folder = sys.argv[1]

class Stage(torch.nn.Module):
    def __init__(self, busy_s=0.0):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.busy_s = busy_s
    def forward(self, x):
        time.sleep(self.busy_s)
        return self.linear(x)

def build(world, busy_s=0.0, **more):
    config = r.Config(microbatches=2, trace_dir=folder)
    loss_fn = torch.nn.functional.mse_loss
    return r.Runtime(Stage(busy_s), world=world, config=config, loss_fn=loss_fn, **more)

def step(runtime):
    return runtime.train_step(torch.ones(4, 8), target=torch.ones(4, 8))

def ready():
    print("ready", flush=True)  # from here on the time counts
"""

WITHOUT_CLOSE = """
async def main(world):
    runtime = await build(world).__aenter__()
    await step(runtime)
    kept.append(runtime)
    ready()
kept = []
r.run(r.run_local(2, main))
"""

WITHOUT_LEAVING_THE_WORLD = """
async def main():
    context = r.local_world(2)
    worlds = await context.__aenter__()
    runtimes = [await build(world).__aenter__() for world in worlds]
    await asyncio.gather(*map(step, runtimes))
    ready()
    sys.exit(3)
r.run(main())
"""

AFTER_AN_EXCEPTION = """
def fail(output, target):
    raise ArithmeticError("no loss today")
async def main(world):
    config = r.Config(microbatches=2, trace_dir=folder)
    async with r.Runtime(Stage(), world=world, config=config, loss_fn=fail) as runtime:
        ready()
        await step(runtime)
r.run(r.run_local(2, main))
"""

CLOSED_TWICE = """
async def main(world):
    async with build(world) as runtime:
        await step(runtime)
        await runtime.close()
        await runtime.close()
    await runtime.close()
    ready()
r.run(r.run_local(2, main))
"""

MID_TASK = """
async def main(world):
    async with build(world, busy_s=30.0) as runtime:
        asyncio.get_running_loop().call_later(0.2, end)
        await step(runtime)
def end():
    ready()
    sys.exit(3)
r.run(r.run_local(2, main))
"""

LATE_DATA = """
def data():
    yield torch.ones(4, 8), torch.ones(4, 8)
    blocked.set()
    time.sleep(30.0)
blocked = threading.Event()
async def main(world):
    async with build(world, data=data()) as runtime:
        await runtime.train_step()
        if world.rank == 1:
            while not blocked.is_set():
                await asyncio.sleep(0.01)
            ready()
            raise ArithmeticError("no more today")
        await runtime.train_step()
r.run(r.run_local(2, main))
"""

INTERRUPTED = """
async def main(world):
    async with build(world, busy_s=0.01) as runtime:
        for number in range(100_000):
            if number == 3 and world.rank == 0:
                ready()
                os.kill(os.getpid(), signal.SIGINT)  # while rank 1 waits for step 3
            await step(runtime)
r.run(r.run_local(2, main))
"""


def _ended(program: str, folder: Path) -> tuple[int, float, str]:
    """Run a program: its exit status, seconds from "ready" to its end, and what it complained."""
    process = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + program, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        begun = time.monotonic()
        _, errors = process.communicate(timeout=20.0)
        took_s = time.monotonic() - begun
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
        return process.returncode, took_s, errors
    finally:
        process.kill()
        process.communicate()  # closes the pipes


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("program", "status", "complaint"),
    [
        pytest.param(WITHOUT_CLOSE, 0, "", id="without close"),
        pytest.param(AFTER_AN_EXCEPTION, 1, "ArithmeticError: no loss today", id="exception"),
        pytest.param(CLOSED_TWICE, 0, "", id="closed twice"),
        pytest.param(MID_TASK, 3, "", id="exit in a task"),
        pytest.param(WITHOUT_LEAVING_THE_WORLD, 3, "", id="no leave", marks=pytest.mark.slow),
    ],
)
def test_the_process_ends_soon(program: str, status: int, complaint: str, tmp_path: Path) -> None:
    """Hazard 25: without close(), after an exception, close() twice: ends in time, no process."""
    code, took_s, errors = _ended(program, tmp_path)
    assert code == status, errors
    assert took_s < ENDS_WITHIN_S
    assert complaint in errors
    assert "Fatal Python error" not in errors


@pytest.mark.multiprocess
def test_an_interrupt_ends_the_process(tmp_path: Path) -> None:
    """Ctrl-C mid-step ends the process in time, as KeyboardInterrupt."""
    code, took_s, errors = _ended(INTERRUPTED, tmp_path)
    assert code != 0
    assert took_s < ENDS_WITHIN_S
    assert errors.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_blocked_data_iterator_does_not_keep_the_process(tmp_path: Path) -> None:
    """Hazard 25: rank 0 waits for data when rank 1 fails: the process ends in time."""
    code, took_s, errors = _ended(LATE_DATA, tmp_path)
    assert code == 1, errors
    assert took_s < ENDS_WITHIN_S

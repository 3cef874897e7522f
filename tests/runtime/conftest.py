"""What every test of the Runtime must leave behind: nothing."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from rrfp_async.gpu.loopback import LoopbackFabric, LoopbackTransfer
from rrfp_async.tasks.stage import Stage

THREADS_END_WITHIN_S = 1.0


class Made:
    """The stages, fabrics and transfer ends that a test has made."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.fabrics: list[LoopbackFabric] = []
        self.transfers: list[LoopbackTransfer] = []


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Notes what is made, and finds it empty at the end."""
    torch.set_num_threads(1)
    made = Made()
    _note(monkeypatch, Stage, made.stages)
    _note(monkeypatch, LoopbackFabric, made.fabrics)
    _note(monkeypatch, LoopbackTransfer, made.transfers)
    threads_before = set(threading.enumerate())
    yield made
    assert [s.index for s in made.stages if s.open_microbatches or s.waiting_arrivals] == []
    assert [fabric.open_meetings for fabric in made.fabrics if fabric.open_meetings] == []
    counts = [transfer.statistics() for transfer in made.transfers]
    assert [c for c in counts if c.open_sends or c.open_receives] == [], "open transfers"
    assert left_over_threads(threads_before) == []


@pytest.fixture(autouse=True)
async def no_task_is_left(made: Made) -> AsyncIterator[None]:
    """The loop has no more tasks after the test than before."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert [task for task in left if not task.done()] == []


def _note(monkeypatch: pytest.MonkeyPatch, kind: type, into: list) -> None:
    init = kind.__init__

    def noting(self: object, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)
        into.append(self)

    monkeypatch.setattr(kind, "__init__", noting)


def left_over_threads(before: set[threading.Thread]) -> list[str]:
    """Our threads that have not ended in time."""
    deadline = time.monotonic() + THREADS_END_WITHIN_S
    ours = [t for t in set(threading.enumerate()) - before if t.name.startswith("rrfp")]
    for thread in ours:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in ours if thread.is_alive()]

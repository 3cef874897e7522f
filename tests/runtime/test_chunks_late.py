"""HAZARDS.md 10 with two stages a rank: an activation that is late keeps no one else waiting."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rrfp_async.ids import Link, TaskId
from tests.runtime.parity import Run, differences, pipelined
from tests.runtime.reference import Case, Step, run_reference
from tests.runtime.worlds import gated

MICROBATCHES = 5
ROWS = WIDTH = 1024  # 4 MiB of floats
GIVE_UP_S = 10.0
LATE_S = [0.2, pytest.param(1.0, marks=pytest.mark.slow)]

LOOP = ("loop", Link(0, 1), 1)
V = ("v", Link(1, 0), 3)
HALVES = ((0, 0, 1, 1), Link(0, 1), 2)
"""Placement, the link whose first tensor is late, and the stage that it is for."""


class Scaled(nn.Module):
    """A stage on (1024, 1024) that notes when its forwards end."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.times: list[float] = []

    def __deepcopy__(self, memo: Any) -> "Scaled":
        other = Scaled()
        other.load_state_dict(self.state_dict())
        other.times = self.times
        return other

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        self.times.append(time.monotonic())
        return y


def case_of(placement: Any, **options: Any) -> Case:
    torch.manual_seed(1)
    shape = (MICROBATCHES * ROWS, WIDTH)
    steps = [Step({0: (torch.randn(shape),)}, torch.randn(shape))]
    options = {"return_outputs": False, "limit": 64, "hint": "bf", **options}
    stages = [Scaled() for _ in range(4)]
    return Case(stages, steps, MICROBATCHES, chunks=2, placement=placement, options=options)


async def run_late(
    case: Case, link: Link, late_s: float, folder: Path, *, forwards: int = 0
) -> tuple[Run, float]:
    """A run whose first tensor on `link` begins so late, and when it began.

    It begins later on a busy machine: not before so many forwards have ended, or ten seconds.
    """
    gate = asyncio.Event()
    held: list[float] = []
    opened: list[float] = []

    def is_first(of: Link, sequence: int) -> bool:
        first = (of, sequence) == (link, 0)
        held.extend([time.monotonic()] * first)
        return first

    def may_open() -> bool:
        late = time.monotonic() - held[0] if held else 0.0
        ended = sum(len(stage.times) for stage in case.stages)
        return late >= GIVE_UP_S or (late >= late_s and ended >= forwards)

    async def open_late() -> None:
        while not may_open():  # noqa: ASYNC110 - stages on other threads are watched
            await asyncio.sleep(0.01)
        opened.append(time.monotonic())
        gate.set()

    opening = asyncio.create_task(open_late())
    run = await pipelined(case, folder, wrap=lambda world: gated(world, gate, is_first))
    await opening
    return run, opened[0]


def dispatched_before(run: Run, late_stage: int) -> set[str]:
    """What each rank dispatched before the first task of microbatch 0 that needs what is late."""
    early: set[str] = set()
    for order in run.orders:
        for task in order:
            stage, kind, microbatch = TaskId.parse(task).stage, task[1], task[2:]
            if microbatch == "0" and (kind != "F" or stage >= late_stage):
                break
            early.add(task)
    return early


@pytest.mark.parametrize("late_s", LATE_S)
@pytest.mark.parametrize("where", [LOOP, V, HALVES], ids=["loop", "v", "halves"])
async def test_all_other_forwards_run_while_the_first_activation_is_late(
    tmp_path: Path, where: tuple[Any, Link, int], late_s: float
) -> None:
    """On both stages of both ranks, over links and local edges, as the logs show; parity."""
    placement, link, late_stage = where
    case = case_of(placement)
    others = {f"{s}F{j}" for s in range(4) for j in range(1, MICROBATCHES)}
    before = {f"{s}F0" for s in range(late_stage)}
    count = len(others | before)
    run, opened = await run_late(case, link, late_s, tmp_path, forwards=count)
    assert dispatched_before(run, late_stage) == others | before
    for index, stage in enumerate(case.stages):
        ended = sum(at < opened for at in stage.times)
        assert ended == MICROBATCHES - (index >= late_stage), f"stage {index} waited"
    assert differences(run_reference(case), run.outcomes) == []


@pytest.mark.parametrize("hint", ["bf", "bfw"])
async def test_their_backwards_run_too_if_the_order_is_free(tmp_path: Path, hint: str) -> None:
    """deterministic=False: nothing but microbatch 0 waits; the gradients within rounding."""
    placement, link, late_stage = LOOP
    case = case_of(placement, deterministic=False, hint=hint)
    forwards = 4 * (MICROBATCHES - 1) + late_stage
    run, _ = await run_late(case, link, 0.5, tmp_path, forwards=forwards)
    kinds = "FIW" if hint == "bfw" else "FB"
    others = {f"{s}{kind}{j}" for s in range(4) for kind in kinds for j in range(1, MICROBATCHES)}
    assert dispatched_before(run, late_stage) == others | {f"{s}F0" for s in range(late_stage)}
    assert differences(run_reference(case), run.outcomes, within=1e-6) == []


async def test_a_tight_limit_keeps_the_places_of_the_late_one(tmp_path: Path) -> None:
    """At a limit of 3 the others take 3 places, not the 2 kept, and wait for it; parity."""
    placement, link, late_stage = LOOP
    case = case_of(placement, limit=3)
    run, _ = await run_late(case, link, 0.2, tmp_path, forwards=5)
    assert dispatched_before(run, late_stage) == {"0F0", "0F1", "0F2", "1F1", "1F2"}
    assert max(result.peak_in_flight for [result] in run.results) <= 5
    assert differences(run_reference(case), run.outcomes) == []

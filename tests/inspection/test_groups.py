"""Ranks that compute a stage together: an explanation names the member that lacked something."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import rrfp_async as r
from tests.inspection.conftest import Ended

LATE_S = 0.06


async def record(folder: Path) -> None:
    """PP2 x TP2; what rank 1 sends, the second member of the first stage, is late."""

    async def main(world: r.World) -> None:
        if world.rank == 1:
            world = r.with_delays(world, r.Delays(0, send_most_s=LATE_S, task_most_s=0.0))
        config = r.Config(microbatches=4, hint="bf", trace_dir=folder)
        async with r.Runtime(
            nn.Linear(64, 64), world=world, config=config, loss_fn=nn.functional.mse_loss
        ) as runtime:
            x = torch.ones(4 * 512, 64)  # too large to come with its header
            await runtime.train_step(x, target=x)

    await r.run_local(4, main, topology=r.Topology(2, tp=2))


async def test_a_late_tensor_on_one_member_is_what_the_other_waited_for(
    rrfp: Callable[..., Ended], tmp_path: Path
) -> None:
    """Rank 2 had its activation; rank 3, which runs the task with it, had not."""
    await record(tmp_path)
    told = rrfp("explain", tmp_path, "--task", "1F0", "--rank", 2)
    words = " ".join(told.out.split())
    assert "1F0 on rank 2 waited for an activation on rank 3 of its group: 0F0 of rank 1" in words


async def test_a_report_has_a_row_for_every_member(
    rrfp: Callable[..., Ended], tmp_path: Path
) -> None:
    """Four ranks, each with times that sum to the step within 0.1 %."""
    await record(tmp_path)
    rows = json.loads(rrfp("report", tmp_path, "--json").out)["rows"]
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    parts = ("compute_s", "blocking_s", "coordination_s", "other_s")
    for row in rows:
        assert sum(row[part] for part in parts) == pytest.approx(row["step_s"], rel=1e-3)

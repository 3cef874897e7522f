"""How a log ends, where there is none, and what a replay takes of it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rrfp_async as r
from rrfp_async.config import Config
from tests.logs import records
from tests.runtime.worlds import each_rank
from tests.sim.tables import even
from tests.trace.test_runs import simulated


async def test_a_failure_is_the_last_line_of_every_rank(tmp_path: Path) -> None:
    """With the first cause, wherever it arose, and what each rank was waiting for."""

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("no result today")

    async def main(world: r.World) -> None:
        stage = Broken() if world.rank == 1 else nn.Linear(4, 4)
        config = r.Config(microbatches=2, trace_dir=tmp_path)
        async with r.Runtime(
            stage, world=world, config=config, loss_fn=nn.functional.mse_loss
        ) as runtime:
            await runtime.train_step(torch.ones(4, 4), target=torch.ones(4, 4))

    raised = await each_rank(3, main)
    assert all(isinstance(error, r.StepFailed) for error in raised)
    for rank in range(3):
        lines = records(tmp_path, rank)
        assert [line["event"] for line in lines].count("failure") == 1
        last = lines[-1]
        assert last["event"] == "failure"
        assert (last["step"], last["rank"], last["stage"], last["task"], last["microbatch"]) == (
            *(0, 1, 1, "1F0", 0),
        )
        assert last["cause"] == "ArithmeticError: no result today"
        assert "tasks have not completed" in last["report"]
    assert "2F0 waits for Activation" in records(tmp_path, 2)[-1]["report"]


async def test_a_step_that_fails_before_it_began_leaves_a_run_and_a_failure(tmp_path: Path) -> None:
    """A batch that does not fit: the clocks were not compared, so their error is unknown."""

    async def main(world: r.World) -> None:
        config = r.Config(microbatches=8, trace_dir=tmp_path)
        async with r.Runtime(
            nn.Linear(4, 4), world=world, config=config, loss_fn=nn.functional.mse_loss
        ) as runtime:
            await runtime.train_step(torch.ones(4, 4), target=torch.ones(4, 4))

    await each_rank(2, main)
    run, failure = records(tmp_path, 0)
    assert (run["event"], run["clock_error_s"]) == ("run", None)
    assert failure["event"] == "failure"
    assert failure["cause"].startswith("ValueError")


async def test_an_error_of_the_users_between_steps_is_the_end_of_the_log(tmp_path: Path) -> None:
    """What leaves the Runtime's block is told, with no report: no step was running."""

    async def main(world: r.World) -> None:
        config = r.Config(microbatches=2, trace_dir=tmp_path)
        async with r.Runtime(
            nn.Linear(4, 4), world=world, config=config, loss_fn=nn.functional.mse_loss
        ) as runtime:
            await runtime.train_step(torch.ones(4, 4), target=torch.ones(4, 4))
            raise KeyError("next")

    await each_rank(1, main)
    last = records(tmp_path, 0)[-1]
    assert (last["event"], last["step"], last["report"]) == ("failure", 1, None)
    assert last["cause"] == "KeyError: 'next'"


async def test_an_optimizer_that_fails_is_the_end_of_the_log(tmp_path: Path) -> None:
    """The tasks were done by then: nothing was waited for, and no step_end is written."""

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ArithmeticError("no update today")

    async def main(world: r.World) -> None:
        stage = nn.Linear(4, 4)
        async with r.Runtime(
            stage,
            world=world,
            config=r.Config(microbatches=2, trace_dir=tmp_path),
            loss_fn=nn.functional.mse_loss,
            optimizer=Broken(stage.parameters(), lr=0.1),
        ) as runtime:
            await runtime.train_step(torch.ones(4, 4), target=torch.ones(4, 4))

    await each_rank(1, main)
    *lines, last = records(tmp_path, 0)
    assert (last["event"], last["step"], last["report"]) == ("failure", 0, None)
    assert "step_end" not in {line["event"] for line in lines}


async def test_a_void_backward_is_logged_and_no_task_of_it_runs(tmp_path: Path) -> None:
    """A frozen first stage has no backward: a line says so, and nobody waits for it."""
    stages = [nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)]

    async def main(world: r.World) -> None:
        config = r.Config(microbatches=2, trace_dir=tmp_path, hint="bf")
        async with r.Runtime(
            stages[world.rank], world=world, config=config, loss_fn=nn.functional.mse_loss
        ) as runtime:
            await runtime.train_step(torch.ones(4, 4), target=torch.ones(4, 4))

    await each_rank(2, main)
    assert [line["task"] for line in records(tmp_path, 0, "void")] == ["0B0", "0B1"]
    assert [line["task"] for line in records(tmp_path, 0, "task")] == ["0F0", "0F1"]


async def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file, no thread, and no record is even made."""
    monkeypatch.setattr("rrfp_async.trace.recorder.open_trace", None)
    monkeypatch.chdir(tmp_path)

    async def main(world: r.World) -> None:
        async with r.Runtime(
            nn.Linear(4, 4),
            world=world,
            config=r.Config(microbatches=2),
            loss_fn=nn.functional.mse_loss,
        ) as runtime:
            await runtime.train_step(torch.ones(4, 4), target=torch.ones(4, 4))

    assert await each_rank(2, main) == [None, None]
    assert os.listdir(tmp_path) == []


def test_a_log_is_replayed_with_all_its_lines(tmp_path: Path) -> None:
    """The replay reads the dispatches among them, whatever else is there."""
    simulated(tmp_path / "first", even(3, 5), hint="bf", limit=2)
    simulated(tmp_path / "again", even(3, 5), hint=f"replay:{tmp_path / 'first'}")
    for rank in range(3):
        first, again = (records(tmp_path / name, rank, "task") for name in ("first", "again"))
        assert first == again


def test_a_line_cut_short_is_refused_by_a_replay_with_its_number(tmp_path: Path) -> None:
    """As a torn file always was."""
    simulated(tmp_path, even(2, 2))
    path = tmp_path / "rank1.jsonl"
    text = path.read_text()
    path.write_text(text[:-20])
    lines = text.count("\n")
    with pytest.raises(ValueError, match=rf"rank1.jsonl, line {lines} is no record"):
        Config(microbatches=2, hint=f"replay:{tmp_path}")
    assert json.loads(text.splitlines()[-1])["event"] == "step_end"

"""Saves and loads that cannot be: told on every rank, with nothing written and nothing changed."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rrfp_async as r
from rrfp_async.checkpoint.storage import Reading, Saving
from tests.runtime.checkpoints import (
    WIDTH,
    Grid,
    adam,
    build,
    cut,
    differing,
    live,
    momentum,
    sgd,
    step,
    values,
)
from tests.runtime.worlds import each_rank

Call = Callable[[r.Runtime], Any]


async def fails(
    calls: list[Call],
    *,
    stages: list[nn.Module] | None = None,
    make: Any = sgd,
    then_steps: bool = True,
    **more: Any,
) -> list[BaseException]:
    """Make each rank's call, which must raise; then the ranks take a step. What each raised."""
    stages = stages or cut(len(calls))

    async def main(world: r.World) -> BaseException:
        async with build(world, stages, make, **more) as runtime:
            with pytest.raises((Exception, asyncio.CancelledError)) as raised:
                await calls[world.rank](runtime)
            if then_steps:
                await step(runtime)
            return raised.value

    async with asyncio.timeout(20.0):
        errors = await each_rank(len(calls), main)
    assert [e for e in errors if isinstance(e, r.StepFailed)] == []
    return errors


def assert_told(errors: list[BaseException], kind: type[Exception], *words: str) -> None:
    """Every rank raised the same, with these words."""
    assert {type(error) for error in errors} == {kind}, errors
    assert len({str(error) for error in errors}) == 1, errors
    assert [word for word in words if word not in str(errors[0])] == [], errors[0]


def save(path: Any, **more: Any) -> Call:
    return lambda runtime: runtime.save(path, **more)


def load(path: Any, **more: Any) -> Call:
    return lambda runtime: runtime.load(path, **more)


async def test_two_stages_that_hold_one_name_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    """Named are both stages, the name and the remedy; also when both are on one rank."""
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    errors = await fails([save(tmp_path / "saved")] * 2, stages=stages)
    assert_told(errors, ValueError, "stages 0 and 1", "'0.weight'", "names=lambda")
    assert not (tmp_path / "saved").exists()

    async def main(world: r.World) -> None:
        async with build(world, stages, sgd) as runtime:
            with pytest.raises(ValueError, match="stages 0 and 1"):
                await runtime.save(tmp_path / "saved")

    await r.run_local(1, main, topology=Grid(1, 2).topology())


@pytest.mark.parametrize("kept", [object(), {"f": print}, [(1, {2: torch.nn.ReLU()})]])
async def test_a_value_that_cannot_be_kept_is_refused(tmp_path: Path, kept: Any) -> None:
    """What is neither tensor nor plain, however deep, is named with its key, on every rank."""
    errors = await fails([save(tmp_path / "saved"), save(tmp_path / "saved", extra={"kept": kept})])
    assert_told(errors, ValueError, "extra['kept'] holds a ", "give a tensor")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("key", "kept", "words"),
    [
        ("of whom", {}, "belongs to no parameter"),
        (None, {"a.b": 1}, "a string without a dot"),
        (None, {"history": object()}, "optimizer.state.7.bias.history holds a object"),
    ],
)
async def test_optimizer_state_that_cannot_be_kept_is_refused_before_any_rank_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None, kept: Any, words: str
) -> None:
    """Found on one rank only: the other has not begun to write either."""
    written = []
    monkeypatch.setattr(Saving, "write", lambda *_: written.append(1))

    async def with_it(runtime: r.Runtime) -> None:
        optimizer = runtime.optimizer
        assert optimizer is not None
        optimizer.state[key or optimizer.param_groups[-1]["params"][-1]] = kept
        await runtime.save(tmp_path / "saved")

    errors = await fails([save(tmp_path / "saved"), with_it], then_steps=False)
    assert_told(errors, ValueError, words)
    assert written == []


async def test_another_models_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """Missing, unknown and reshaped parameters are named together, with both shapes."""
    await live(Grid(2), sgd, 1, save=tmp_path / "saved")
    stages = cut(2, seed=1)
    stages[0].append(nn.Linear(2, 3))  # the module "4": of another shape
    stages[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH))  # the module "0": doubled
    with_names = {"names": lambda stage, name: f"new.{name}" if stage == 1 else name}
    before = values(stages)
    errors = await fails(
        [load(tmp_path / "saved")] * 2, stages=stages, then_steps=False, **with_names
    )
    assert_told(errors, ValueError, "missing there", "model.new.0.weight", "not known here")
    assert_told(errors, ValueError, "4.weight (there (6, 6)", "on stage 0 (3, 2)", "names=")
    assert differing(values(stages), before) == []


async def test_a_checkpoint_without_optimizer_state_is_refused_by_an_optimizer(
    tmp_path: Path,
) -> None:
    """Its hyperparameters are missing: named, unless the optimizer is to be left alone."""
    await live(Grid(2), None, 0, save=tmp_path / "saved")
    errors = await fails([load(tmp_path / "saved")] * 2, make=adam)
    assert_told(errors, ValueError, "missing there: optimizer.param_groups.0.linear.bias")


async def test_groups_that_were_others_are_refused_and_change_nothing(tmp_path: Path) -> None:
    """Parameters of one group must have had the same hyperparameters."""

    def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first]}, {"params": rest, "lr": 0.5}], lr=0.1)

    await live(Grid(2), two_groups, 1, save=tmp_path / "saved")
    stages = cut(2, seed=1)
    before = values(stages)
    errors = await fails([load(tmp_path / "saved")] * 2, stages=stages, then_steps=False)
    assert_told(errors, ValueError, "in one group", "lr=0.1", "lr=0.5")
    assert differing(values(stages), before) == []


@pytest.mark.parametrize("there", ["nothing", "a file", "a folder"])
async def test_a_load_from_a_path_without_checkpoint_is_refused(tmp_path: Path, there: str) -> None:
    """Whatever else is there."""
    path = tmp_path / "saved"
    if there != "nothing":
        path.mkdir() if there == "a folder" else path.write_text("mine")
    errors = await fails([load(path)] * 2)
    assert_told(errors, ValueError, str(path), "holds no checkpoint")


async def test_a_save_over_something_else_is_refused(tmp_path: Path) -> None:
    """A folder or a file of the user's stays as it is."""
    (tmp_path / "mine").write_text("mine")
    assert_told(await fails([save(tmp_path)] * 2), ValueError, str(tmp_path), "no checkpoint")
    errors = await fails([save(tmp_path / "mine")] * 2)
    assert_told(errors, ValueError, "is a file")
    assert os.listdir(tmp_path) == ["mine"]


async def test_a_path_that_cannot_be_written_is_told_on_every_rank(tmp_path: Path) -> None:
    """With the path, the operating system's words and the remedy; then a step runs."""
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "saved"
    errors = await fails([save(path)] * 2)
    assert_told(errors, r.CheckpointError, str(path), "NotADirectoryError", "every rank can write")


async def test_a_damaged_checkpoint_is_told_on_every_rank(tmp_path: Path) -> None:
    """A data file that one rank reads was cut short: nothing is changed on the other either."""
    await live(Grid(2), adam, 1, save=tmp_path / "saved")
    [data] = (tmp_path / "saved").rglob("1/*.distcp")
    data.write_bytes(data.read_bytes()[:1000])
    stages = cut(2, seed=1)
    before = values(stages)
    errors = await fails([load(tmp_path / "saved")] * 2, make=adam, stages=stages, then_steps=False)
    assert_told(errors, r.CheckpointError, str(tmp_path / "saved"), "cannot be read")
    assert differing(values(stages), before) == []


@pytest.mark.parametrize("where", ["write", "publish"])
async def test_a_save_that_fails_leaves_the_older_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """On one rank after it has written its part, or as all is put together: no data is left."""
    older = await live(Grid(2), adam, 1, save=tmp_path / "saved")
    original = getattr(Saving, where)

    def full(self: Saving, *args: Any) -> None:
        if where == "publish":
            monkeypatch.setattr("os.replace", _disk_full)
        original(self, *args)
        if self._rank == 1:
            raise r.CheckpointError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Saving, where, full)
        errors = await fails([save(tmp_path / "saved")] * 2, make=adam)
    assert_told(errors, r.CheckpointError, "disk is full")
    monkeypatch.undo()
    assert len(list((tmp_path / "saved").glob("data-*"))) == 1
    loaded = await live(Grid(1), adam, 0, load=tmp_path / "saved", seed=1)
    assert differing(loaded.values, older.values) == []


def _disk_full(*_: Any) -> None:
    raise OSError("disk is full")


async def test_a_reader_finds_the_older_checkpoint_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read between the writing of all parts and their publishing, and once more after it."""
    await live(Grid(2), sgd, 1, save=tmp_path / "saved")
    seen = []
    publish = Saving.publish

    def watched(self: Saving, ranks: int) -> None:
        for act in (lambda: None, lambda: publish(self, ranks)):
            act()
            seen.append(Reading(tmp_path / "saved").read(["run.steps_trained"]))

    monkeypatch.setattr(Saving, "publish", watched)
    await live(Grid(2), sgd, 5, save=tmp_path / "saved")
    assert [read["run.steps_trained"] for read in seen] == [1, 5]


@pytest.mark.parametrize("canceller", [0, 1])
async def test_a_save_cancelled_on_one_rank_ends_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, canceller: int
) -> None:
    """Others are told who; nothing is at the path, and steps go on."""
    writing = asyncio.Event()
    loop = asyncio.get_running_loop()
    write = Saving.write

    def slow(self: Saving, state: Any) -> None:
        loop.call_soon_threadsafe(writing.set)
        write(self, state)

    async def cancelled(runtime: r.Runtime) -> None:
        saving = asyncio.create_task(runtime.save(tmp_path / "saved"))
        await writing.wait()
        saving.cancel()
        await saving

    monkeypatch.setattr(Saving, "write", slow)
    calls = [save(tmp_path / "saved")] * 2
    calls[canceller] = cancelled
    errors = await fails(calls)
    assert isinstance(errors.pop(canceller), asyncio.CancelledError)
    assert_told(errors, r.CheckpointError, f"cancelled on rank {canceller}")
    assert not (tmp_path / "saved" / ".metadata").exists()


async def test_a_save_cancelled_as_it_is_published_leaves_the_new_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in place stays, though every rank hears of the cancellation."""
    published, cancelled = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    publish = Saving.publish

    def slow(self: Saving, ranks: int) -> None:
        publish(self, ranks)
        loop.call_soon_threadsafe(published.set)
        assert cancelled.wait(5.0)

    async def cancelling(runtime: r.Runtime) -> None:
        saving = asyncio.create_task(runtime.save(tmp_path / "saved"))
        await published.wait()
        saving.cancel()
        await asyncio.sleep(0)
        cancelled.set()
        await saving

    monkeypatch.setattr(Saving, "publish", slow)
    errors = await fails([cancelling, save(tmp_path / "saved")])
    assert [type(error) for error in errors] == [asyncio.CancelledError, r.CheckpointError]
    loaded = await live(Grid(1), sgd, 0, load=tmp_path / "saved", seed=1)
    assert differing(loaded.values, values(cut(2))) == []


async def test_ranks_that_call_different_things_are_told_so(tmp_path: Path) -> None:
    """A save and a load, or two paths: named are both."""
    errors = await fails([save(tmp_path / "one"), save(tmp_path / "two")])
    assert_told(errors, ValueError, "one", "two", "same on every rank")
    errors = await fails([save(tmp_path / "one"), load(tmp_path / "one")])
    assert_told(errors, ValueError, "save(", "load(")


async def test_a_rank_that_does_not_come_is_named_and_finds_out_when_it_does(
    tmp_path: Path,
) -> None:
    """After `stall_timeout_s`. The next save, which all call, succeeds."""
    given_up = asyncio.Event()

    async def punctual(runtime: r.Runtime) -> None:
        try:
            await runtime.save(tmp_path / "saved")
        finally:
            given_up.set()

    async def late(runtime: r.Runtime) -> None:
        await given_up.wait()
        await runtime.save(tmp_path / "saved")

    settings = {"stall_timeout_s": 0.5, "peer_timeout_s": 0.5}
    errors = await fails([punctual, punctual, late], settings=settings)
    told = f"save('{tmp_path / 'saved'}'): rank 2 has not come within 0.5 s"
    assert_told(errors, r.CheckpointError, told)


async def test_gradients_without_update_are_not_lost_by_a_save(tmp_path: Path) -> None:
    """Refused until the update; a load drops them, and its next step equals a fresh one."""
    await live(Grid(2), momentum, 0, save=tmp_path / "saved")
    expected = await live(Grid(2), momentum, 2, load=tmp_path / "saved")
    stages = cut(2)

    async def main(world: r.World) -> list[float | None]:
        async with build(world, stages, momentum) as runtime:
            await step(runtime, update=False)
            with pytest.raises(r.StateError, match="update=False"):
                await runtime.save(tmp_path / "other")
            await runtime.load(tmp_path / "saved")
            return [await step(runtime) for _ in range(2)]

    assert await r.run_local(2, main) == [expected.losses] * 2
    assert differing(values(stages), expected.values) == []


@pytest.mark.parametrize("call", [save, load])
async def test_a_save_or_load_during_a_step_or_after_close_is_refused(
    tmp_path: Path, call: Callable[..., Call]
) -> None:
    """And a step during a save; what runs already ends well."""
    stages = cut(2)

    async def main(world: r.World) -> None:
        async with build(world, stages, sgd) as runtime:
            running = asyncio.create_task(step(runtime))
            await asyncio.sleep(0)
            with pytest.raises(r.StateError, match="await it first"):
                await call(tmp_path / "saved")(runtime)
            await running
            running = asyncio.create_task(runtime.save(tmp_path / "saved"))
            await asyncio.sleep(0)
            with pytest.raises(r.StateError, match="save or load is running"):
                await step(runtime)
            await running
        with pytest.raises(r.StateError, match="closed"):
            await call(tmp_path / "saved")(runtime)

    await r.run_local(2, main)

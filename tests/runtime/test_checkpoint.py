"""Checkpoints of the whole pipeline: what is saved, resumed, converted, and left alone."""

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

import rrfp_async as r
from rrfp_async.checkpoint import storage
from rrfp_async.checkpoint.part import Held, Part
from rrfp_async.checkpoint.whole import Card, put_together
from tests.runtime.checkpoints import (
    OPTIMIZERS,
    Grid,
    Life,
    adam,
    adamw_groups,
    build,
    cut,
    differing,
    layers,
    live,
    momentum,
    sgd,
    step,
    values,
    whole,
)

GRIDS = {
    "one rank": Grid(1),
    "three ranks": Grid(3),
    "eight ranks": Grid(8),
    "two ranks of two stages": Grid(2, 2),
}


SAMPLED = dict(zip(OPTIMIZERS, GRIDS, strict=True))
RESUMES = [
    pytest.param(
        make,
        grid,
        id=f"{name}, {cut_in}",
        marks=[] if SAMPLED[name] == cut_in else pytest.mark.slow,
    )
    for name, make in OPTIMIZERS.items()
    for cut_in, grid in GRIDS.items()
]


@pytest.mark.parametrize(("make", "grid"), RESUMES)
async def test_steps_after_a_resume_on_other_ranks_equal_an_unbroken_run_bit_for_bit(
    make: Any, grid: Grid, tmp_path: Path
) -> None:
    """Three steps on two ranks, save, three on others: losses and values of six steps on two."""
    unbroken = await live(Grid(2), make, 6)
    first = await live(Grid(2), make, 3, save=tmp_path / "saved")
    second = await live(grid, make, 3, load=tmp_path / "saved", seed=1)
    assert first.losses + second.losses == unbroken.losses
    assert differing(second.values, unbroken.values) == []


async def test_a_checkpoint_converts_to_what_the_unpartitioned_model_and_optimizer_load(
    tmp_path: Path,
) -> None:
    """`dcp_to_torch_save` makes a dict that needs no rrfp_async: its model and optimizer go on."""
    saved = await live(Grid(3), adamw_groups, 3, save=tmp_path / "saved")
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "saved.pt")
    state = torch.load(tmp_path / "saved.pt", weights_only=True)
    model = whole(seed=1)
    model.load_state_dict(state["model"])
    assert differing(model.state_dict(), saved.values) == []
    optimizer = adamw_groups(list(model.parameters()))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    resumed = await live(Grid(3), adamw_groups, 1, load=tmp_path / "saved")
    assert resumed.losses == [_step_unpartitioned(model, optimizer, number=3)]
    assert differing(model.state_dict(), resumed.values) == []


def _step_unpartitioned(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, *, number: int
) -> float:
    """The step of `checkpoints.step`, in plain torch."""
    draw = torch.Generator().manual_seed(number)
    inputs, target = torch.randn(2, 4, 6, generator=draw).unbind()
    optimizer.zero_grad()
    parts = zip(inputs.tensor_split(2), target.tensor_split(2), strict=True)
    losses = [nn.functional.mse_loss(model(x), y) for x, y in parts]
    for loss in losses:
        (loss * 0.5).backward()
    optimizer.step()
    return sum(float(loss.detach()) * 0.5 for loss in losses)


async def test_the_names_on_disk_do_not_hang_on_the_partition(tmp_path: Path) -> None:
    """The same keys from one rank and from four of two stages."""
    keys = []
    for index, grid in enumerate((Grid(1), Grid(4, 2))):
        folder = tmp_path / str(index)
        await live(grid, momentum, 1, save=folder)
        dcp_to_torch_save(folder, tmp_path / "saved.pt")
        state = torch.load(tmp_path / "saved.pt", weights_only=True)
        keys.append({(section, key) for section in state for key in state[section]})
    assert keys[0] == keys[1]
    assert ("model", "3.seen") in keys[0]
    assert ("optimizer", "state.0.linear.weight.momentum_buffer") in keys[0]
    assert ("optimizer", "param_groups.7.bias.lr") in keys[0]
    assert ("model", "0.scratch") not in keys[0]


async def test_a_fresh_optimizer_is_restored_as_one(tmp_path: Path) -> None:
    """State that came after the save goes, and the learning rate returns; so do the steps."""
    stages = cut(2)

    async def main(world: r.World) -> tuple[int, int, float]:
        async with build(world, stages, adam) as runtime:
            await runtime.save(tmp_path / "saved")
            await step(runtime)
            assert runtime.optimizer is not None
            runtime.optimizer.param_groups[0]["lr"] = 7.0
            assert len(runtime.optimizer.state) > 0
            assert await runtime.load(tmp_path / "saved") == {}
            held = runtime.optimizer
            return runtime.steps_trained, len(held.state), held.param_groups[0]["lr"]

    assert await r.run_local(2, main) == [(0, 0, 0.01)] * 2
    assert differing(values(stages), values(cut(2))) == []


async def test_ranks_without_optimizer_or_parameters_take_part(tmp_path: Path) -> None:
    """A stage of activations and a pipeline without optimizers save and load like any other."""
    stages = [nn.Sequential(nn.Linear(6, 6)), nn.Tanh()]

    async def main(world: r.World, make: Any) -> None:
        async with build(world, stages, make) as runtime:
            await step(runtime)
            await runtime.save(tmp_path / "saved")
            await runtime.load(tmp_path / "saved")
            await step(runtime)

    for make in (adam, None):
        await r.run_local(2, functools.partial(main, make=make))


async def test_optimizer_false_loads_the_model_into_a_pipeline_without_optimizer(
    tmp_path: Path,
) -> None:
    """For evaluation. Without the word, an optimizer's state that nobody wants is an error."""
    saved = await live(Grid(2), momentum, 2, save=tmp_path / "saved")
    stages = cut(4, seed=1)

    async def main(world: r.World) -> None:
        async with build(world, stages, None) as runtime:
            with pytest.raises(ValueError, match=r"optimizer=False"):
                await runtime.load(tmp_path / "saved")
            await runtime.load(tmp_path / "saved", optimizer=False)

    await r.run_local(4, main)
    assert differing(values(stages), saved.values) == []


async def test_a_plain_torch_model_can_be_loaded(tmp_path: Path) -> None:
    """What `torch_save_to_dcp` makes of `{"model": state_dict}` starts a pipeline."""
    model = whole()
    torch.save({"model": model.state_dict()}, tmp_path / "model.pt")
    torch_save_to_dcp(tmp_path / "model.pt", tmp_path / "model")
    stages = cut(2, seed=1)

    async def main(world: r.World) -> int:
        async with build(world, stages, adam) as runtime:
            await runtime.load(tmp_path / "model", optimizer=False)
            return runtime.steps_trained

    assert await r.run_local(2, main) == [0, 0]
    assert differing(values(stages), model.state_dict()) == []


async def test_extra_comes_back_on_every_rank_and_the_lowest_giver_of_a_key_is_heard(
    tmp_path: Path,
) -> None:
    """Tensors and plain values, nested; each rank may add keys of its own."""
    stages = cut(2)

    async def main(world: r.World) -> dict[str, Any]:
        mine = {"of both": world.rank, f"of {world.rank}": {"x": [1, (2.5, None)], "y": "z"}}
        if world.rank == 1:
            mine["tensor"] = torch.arange(3)
        async with build(world, stages, sgd) as runtime:
            await runtime.save(tmp_path / "saved", extra=mine)
            return await runtime.load(tmp_path / "saved")

    nested = {"x": [1, (2.5, None)], "y": "z"}
    for extra in await r.run_local(2, main):
        assert torch.equal(extra.pop("tensor"), torch.arange(3))
        assert extra == {"of both": 0, "of 0": nested, "of 1": nested}


async def test_names_says_what_parameters_are_called_in_the_unpartitioned_model(
    tmp_path: Path,
) -> None:
    """Two stages that both count from 0, saved under the layers' names, resume as one stage."""
    parts = list(layers().values())
    stages = [nn.Sequential(*parts[:4]), nn.Sequential(*parts[4:])]

    def names(stage: int, name: str) -> str:
        layer, _, rest = name.partition(".")
        return f"{int(layer) + 4 * stage}.{rest}"

    async def main(world: r.World) -> float | None:
        async with build(world, stages, adam, names=names) as runtime:
            await step(runtime)
            await runtime.save(tmp_path / "saved")
            return await step(runtime)

    expected = await r.run_local(2, main)
    assert (await live(Grid(1), adam, 1, load=tmp_path / "saved", seed=1)).losses == expected[:1]


async def test_files_are_written_and_read_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever touches files waits here for the loop, which must be free to let it go on."""
    loop = asyncio.get_running_loop()
    touched = []

    def waiting(work: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(timeout=5.0)
            touched.append(work.__name__)
            return work(*args)

        return wrapped

    for owner, name in (
        (storage, "check_target"),
        (storage.Saving, "write"),
        (storage.Saving, "publish"),
        (storage.Reading, "read"),
    ):
        monkeypatch.setattr(owner, name, waiting(getattr(owner, name)))
    await live(Grid(2), adam, 0, save=tmp_path / "saved")
    await live(Grid(1), adam, 0, load=tmp_path / "saved")
    assert sorted(touched) == ["check_target", "check_target", "publish", "read", "write", "write"]


async def test_a_save_replaces_an_older_one_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    """One folder of data is left, and what is loaded is the newer."""
    await live(Grid(2), adam, 1, save=tmp_path / "saved")
    newer = await live(Grid(3), adam, 2, save=tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("data-*"))) == 1
    loaded: Life = await live(Grid(1), adam, 0, load=tmp_path / "saved", seed=1)
    assert differing(loaded.values, newer.values) == []


def test_a_compiled_layer_keeps_its_names() -> None:
    """What torch.compile puts in front of names is not part of them."""
    compiled = torch.compile(nn.Linear(2, 3), backend="eager")
    part = Part({0: nn.Sequential(compiled)}, None, None)
    assert [held.name for held in part.held()] == ["0.weight", "0.bias"]


def test_a_tied_name_is_written_by_its_lowest_stage() -> None:
    """Two stages may hold a name that is said to be tied, if it has one shape."""

    def card(stage: int, kind: str) -> Card:
        return Card("save", [Held("embedding", stage, kind)], [], [], "id")

    cards = [card(3, "(2,)"), card(1, "(2,)")]
    assert put_together(cards, tied={"embedding"}).left_out([3]) == {"embedding"}
    assert put_together(cards, tied={"embedding"}).left_out([1]) == set()
    with pytest.raises(ValueError, match="both hold a 'embedding'"):
        put_together(cards, tied=set())
    with pytest.raises(ValueError, match="same shape"):
        put_together([card(3, "(2,)"), card(1, "(3,)")], tied={"embedding"})

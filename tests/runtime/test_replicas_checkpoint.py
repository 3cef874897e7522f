"""Checkpoints of a pipeline with replicas: one writes, all load."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rrfp_async as r
from tests.runtime.checkpoints import WIDTH, adam, cut, differing, values


async def live(
    topology: r.Topology, steps: int, *, load: Any = None, save: Any = None, seed: int = 0
) -> tuple[list[list[float | None]], list[dict[str, Tensor]]]:
    """Load, train so many steps, save; losses by rank, and the values of each replica."""
    found: list[dict[str, Tensor]] = [{} for _ in range(topology.dp)]

    async def main(world: r.World) -> list[float | None]:
        made = cut(topology.num_stages, seed)
        held = [made[stage] for stage in topology.stages_of(world.place.pp)]
        async with r.Runtime(
            held,
            world=world,
            config=r.Config(microbatches=2),
            loss_fn=nn.functional.mse_loss,
            optimizer=adam,
        ) as runtime:
            if load is not None:
                extra = await runtime.load(load)
                assert extra == {"of 0": 0, "of 3": 3}
            losses = []
            for _ in range(steps):
                draw = torch.Generator().manual_seed(runtime.steps_trained)
                batch = torch.randn(2, 8, WIDTH, generator=draw)
                x, y = batch.tensor_split(topology.dp, dim=1)[world.place.dp].unbind()
                losses.append((await runtime.train_step(x, target=y)).loss)
            if save is not None:
                mine = {f"of {world.rank}": world.rank} if world.rank in (0, 3) else {}
                await runtime.save(save, extra=mine)
        found[world.place.dp] |= values(held)
        return losses

    return await r.run_local(topology.world_size, main, topology=topology), found


async def test_a_save_of_replicas_resumes_on_any_number_of_them(tmp_path: Path) -> None:
    """Bit for bit where as many sum up; each replica loads all; extra comes from any rank."""
    saved = tmp_path / "saved"
    unbroken, (wanted, twin) = await live(r.Topology(2, dp=2), 4)
    first, (then, _) = await live(r.Topology(2, dp=2), 2, save=saved)
    second, (found, other) = await live(r.Topology(4, dp=2), 2, load=saved, seed=1)
    assert first[0] + second[0] == unbroken[0]
    assert differing(found, wanted) == []
    parameters = [name for name in wanted if not name.endswith("seen")]
    assert all(torch.equal(other[name], twin[name]) for name in parameters)
    _, (loaded,) = await live(r.Topology(1, dp=1), 0, load=saved, seed=1)
    assert differing(loaded, then) == []
    alone, (last,) = await live(r.Topology(3, dp=1), 2, load=saved, seed=1)
    assert alone[0] == pytest.approx(unbroken[0][2:], abs=1e-6)
    assert all((last[name] - wanted[name]).abs().max() < 1e-5 for name in parameters)


async def test_what_is_saved_is_there_once(tmp_path: Path) -> None:
    """The second replica's files hold no parameters."""
    await live(r.Topology(2, dp=2), 1, save=tmp_path / "saved")
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / "saved").glob(f"data-*/{rank}/*.distcp"))
        for rank in range(4)
    ]
    assert sizes[1] == 0
    assert sizes[3] < min(sizes[0], sizes[2]) / 5


async def test_shards_of_tensor_parallel_stages_and_of_zero_are_refused(tmp_path: Path) -> None:
    """On every rank, before anything is written; training can go on."""

    class Sharded(torch.optim.SGD):
        def consolidate_state_dict(self) -> None:
            raise AssertionError

    async def main(world: r.World) -> None:
        async with r.Runtime(
            nn.Linear(WIDTH, WIDTH),
            world=world,
            config=r.Config(microbatches=2),
            optimizer=(lambda held: Sharded(held, lr=0.1)) if world.topology.dp > 1 else None,
        ) as runtime:
            with pytest.raises(r.StateError, match="in shards on several ranks") as refused:
                await runtime.save(tmp_path / "saved")
            assert ("tp=2" in str(refused.value)) is (world.topology.tp == 2)
            with pytest.raises(r.StateError, match="in shards on several ranks"):
                await runtime.load(tmp_path / "saved")

    for topology in (r.Topology(1, tp=2), r.Topology(1, dp=2)):
        await r.run_local(2, main, topology=topology)
    assert not (tmp_path / "saved").exists()

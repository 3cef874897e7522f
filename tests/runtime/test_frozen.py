"""Hazard 6: frozen parts cost no backward; what is trainable trains as in one piece."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rrfp_async as r
from tests.runtime.parity import assert_parity, chain_case, linear_stages, pipelined


def frozen_but(trainable: Sequence[int], count: int) -> list[nn.Module]:
    """Linear stages of which only some have parameters that want a gradient."""
    stages = linear_stages(count)
    for index, stage in enumerate(stages):
        stage.requires_grad_(index in trainable)
    return stages


def dispatched(folder: Path, rank: int, event: str = "dispatch") -> list[str]:
    lines = (folder / f"rank{rank}.jsonl").read_text().splitlines()
    records = map(json.loads, lines)
    return [record["task"] for record in records if record["event"] == event]


@pytest.mark.parametrize("hint", ["bf", "bfw", "1f1b", "zb-h1"])
@pytest.mark.parametrize("trainable", [(0,), (3,), (1, 2), (2,), ()])
async def test_no_backward_runs_below_the_first_trainable_stage(
    trainable: tuple[int, ...], hint: str, tmp_path: Path
) -> None:
    """Parity, no B, I or W where nothing has a gradient, no W where nothing is trainable."""
    case = chain_case(4, microbatches=3, stages=frozen_but(trainable, 4), options={"hint": hint})
    await assert_parity(case, tmp_path, seeds=range(3), orders_differ=False)
    first = min(trainable, default=4)
    for rank in range(4):
        kinds = {task[1] for task in dispatched(tmp_path / "seed0", rank)}
        if rank < first and trainable:
            assert kinds == {"F"}
        if rank not in trainable:
            assert "W" not in kinds


@pytest.mark.parametrize("placement", ["loop", "v"])
@pytest.mark.parametrize("trainable", [(2,), (1, 3), (0,)])
async def test_frozen_chunks_have_parity(
    trainable: tuple[int, ...], placement: str, tmp_path: Path
) -> None:
    """Also where the gradient would not leave the rank."""
    case = chain_case(
        4, microbatches=4, stages=frozen_but(trainable, 4), chunks=2, placement=placement
    )
    await assert_parity(case, tmp_path, seeds=range(5))


async def test_a_pipeline_without_trainable_parameters_runs(tmp_path: Path) -> None:
    """A training step of it is a loss, and no gradient."""
    case = chain_case(2, microbatches=3, stages=frozen_but((), 2))
    await assert_parity(case, tmp_path, seeds=range(2), orders_differ=False)


async def test_a_run_with_frozen_stages_can_be_replayed(tmp_path: Path) -> None:
    """What did not run is in the log, and does not run in the replay."""
    case = chain_case(3, microbatches=3, stages=frozen_but((2,), 3), options={"hint": "bf"})
    run = await pipelined(case, tmp_path / "first")
    again = chain_case(
        3,
        microbatches=3,
        stages=frozen_but((2,), 3),
        options={"hint": f"replay:{tmp_path / 'first'}"},
    )
    replayed = await pipelined(again, tmp_path / "second")
    assert replayed.outcomes[0].loss == run.outcomes[0].loss
    for rank in range(3):
        assert dispatched(tmp_path / "second", rank) == dispatched(tmp_path / "first", rank)
    assert dispatched(tmp_path / "first", 0, "void") == ["0B0", "0B1", "0B2"]


async def test_a_step_may_freeze_what_the_last_one_trained(tmp_path: Path) -> None:
    """Gradual unfreezing: what wants a gradient is asked at every forward."""
    stages = linear_stages(3)
    topology = r.Topology(3)
    torch.manual_seed(1)
    x, y = torch.randn(2, 6, 8).unbind()
    seen: list[list[bool]] = []

    async def main(world: r.World) -> None:
        config = r.Config(microbatches=3, trace_dir=tmp_path)
        stage = stages[world.rank]
        async with r.Runtime(
            stage, world=world, config=config, loss_fn=nn.functional.mse_loss
        ) as runtime:
            for first in (2, 0, 1):
                stage.requires_grad_(world.rank >= first)
                await runtime.train_step(x, target=y)
                seen.append([p.grad is not None for p in stage.parameters()])

    await r.run_local(3, main, topology=topology)
    assert sorted(map(all, seen)) == [False] * 3 + [True] * 6
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "rank0.jsonl").read_text().splitlines()
        if json.loads(line)["event"] == "void"
    ]
    assert steps == [0] * 3 + [2] * 3


async def test_many_void_backwards_in_reverse_end_at_once(tmp_path: Path) -> None:
    """A thousand that wait for the first one's turn are no thousand frames of the stack."""

    class Youngest(r.RankedHint):
        def rank(self, task: r.TaskId) -> int:
            return -task.microbatch

    case = chain_case(
        2,
        microbatches=1200,
        batch=1200,
        stages=frozen_but((1,), 2),
        options={"hint": Youngest(), "limit": 1200, "deterministic": True},
    )
    run = await pipelined(case, tmp_path)
    assert run.outcomes[0].loss is not None


class _Sometimes(nn.Module):
    """Gives its second output a gradient for some microbatches only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y if x[0, 0] > 0 else y.detach()


async def test_a_stage_may_want_a_gradient_for_some_microbatches_only(tmp_path: Path) -> None:
    """Each microbatch's forward tells."""
    stages = [_Sometimes(), *linear_stages(2)]
    case = chain_case(3, microbatches=6, batch=6, stages=stages, options={"hint": "bfw"})
    runs = await assert_parity(case, tmp_path, seeds=range(5))
    assert sum(task.startswith("0W") for task in runs[0].orders[0]) > 0

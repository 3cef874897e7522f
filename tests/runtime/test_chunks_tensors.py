"""What stages of one rank may hand to one another, and what they may share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rrfp_async as r
from rrfp_async.tasks.build import build_stages
from tests.runtime.chunks import assert_chunk_parity, on_one_rank, sgd, step
from tests.runtime.parity import chain_case, linear_stages
from tests.runtime.reference import Case, Step
from tests.runtime.test_hazards_tensors import (
    Aliased,
    InPlace,
    Mixed,
    Mixing,
    OddIgnores,
    Reusing,
    Scalars,
    Shaped,
    Summed,
    Tail,
    TwoHeads,
    UsesScalar,
)

ONE_RANK, HALF_LOCAL, V = "one rank", (0, 0, 1, 1), "v"
"""Placements of four stages with 3, 2 and 1 local edges."""

FEW = [range(2), pytest.param(range(2, 8), marks=pytest.mark.slow)]
Where = tuple[Any, str]

WHERE = [(ONE_RANK, "bf"), (HALF_LOCAL, "bfw"), (V, "bf")]
ELSE = [(ONE_RANK, "bfw"), (HALF_LOCAL, "bf"), (V, "bfw")]


@pytest.fixture(
    params=[*WHERE, *(pytest.param(where, marks=pytest.mark.slow) for where in ELSE)], ids=str
)
def where(request: pytest.FixtureRequest) -> Where:
    """Where the four stages of a case live, and whether the backward is whole or in two."""
    return request.param


def placed(case: Case, where: Where) -> Case:
    placement, hint = where
    case = replace(case, options={"hint": hint})
    if placement == ONE_RANK:
        return on_one_rank(case)
    return replace(case, chunks=2, placement=placement)


async def check(case: Case, where: Where, folder: Path, seeds: range = FEW[0], **more: Any) -> None:
    """Parity with the unpartitioned model, however the four stages are placed."""
    case = placed(case, where)
    await assert_chunk_parity(case, folder, seeds=seeds, orders_differ=False, **more)


@pytest.mark.parametrize("seeds", FEW)
async def test_a_stage_may_write_to_what_it_was_handed(
    tmp_path: Path, where: Where, seeds: range
) -> None:
    """Its first operation is in place, and the stage before has saved its own output: parity."""
    torch.manual_seed(1)
    stages = [*linear_stages(1), InPlace(), nn.Sequential(InPlace(), nn.Tanh()), InPlace()]
    await check(chain_case(4, microbatches=4, stages=stages), where, tmp_path, seeds)


class Fanned(nn.Module):
    """Writes to all it was handed, then uses it; what it was handed may be one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, *tensors: Tensor) -> Tensor:
        for tensor in tensors[1:]:
            tensor.mul_(0.5)
        return self.linear(sum(tensors[1:], tensors[0])).tanh()


async def test_stages_that_share_an_input_each_have_their_own(tmp_path: Path, where: Where) -> None:
    """An output that two stages of the rank write to in place: neither sees the other: parity."""
    torch.manual_seed(2)
    stages = [*linear_stages(1), InPlace(), Fanned(), Fanned()]
    edges = ((0, 1), (0, 2), (1, 2), (0, 3), (2, 3))
    case = chain_case(4, microbatches=4, stages=[s.double() for s in stages], dtype=torch.float64)
    case = replace(case, edges=edges)
    await check(case, where, tmp_path, within=1e-9)  # three gradients are summed


async def test_a_frozen_stage_may_write_to_what_it_was_handed(tmp_path: Path, where: Where) -> None:
    """No gradient is wanted, and an evaluation comes between: parity."""
    torch.manual_seed(3)
    stages = [nn.Linear(8, 8), InPlace(), InPlace(), InPlace()]
    for stage in stages[:2]:
        stage.requires_grad_(False)
    case = chain_case(4, microbatches=4, stages=stages, make_optimizer=sgd)
    case = replace(case, steps=[step(8), step(6, training=False), step(4)])
    await check(case, where, tmp_path)


@pytest.mark.parametrize("way", ["transpose", "expand", "strided slice"])
async def test_a_stage_may_hand_on_a_view(tmp_path: Path, where: Where, way: str) -> None:
    """Not contiguous, overlapping or with gaps; the copy is contiguous as a link's: parity."""
    torch.manual_seed(4)
    stages = [Shaped(way), Shaped(way), Shaped(way), nn.Linear(8, 8)]
    case = Case(stages, [step(8, 8, 8)], microbatches=4)
    await check(case, where, tmp_path)


async def test_a_stage_may_end_in_a_view_of_what_it_was_handed(
    tmp_path: Path, where: Where
) -> None:
    """A flatten, then a reshape, then the input as it came: no parameter, no copy of its own."""
    torch.manual_seed(5)
    stages = [nn.Linear(8, 8), nn.Flatten(1), nn.Unflatten(1, (3, 8)), nn.Identity()]
    case = Case(stages, [step(8, 3, 8)], microbatches=4)
    await check(case, where, tmp_path)


async def test_tensors_of_any_kind_are_handed_over(tmp_path: Path, where: Where) -> None:
    """(hidden, bool, int64, float64 without grad): exact; a gradient only for hidden: parity."""
    torch.manual_seed(6)
    stages = [Mixed(), Mixing(), Mixing(), Tail()]
    await check(chain_case(4, microbatches=4, stages=stages), where, tmp_path)
    for mixing in stages[1:3]:
        for hidden, mask, ids, constant in mixing.seen:
            kinds = [tensor.dtype for tensor in (mask, ids, constant)]
            assert kinds == [torch.bool, torch.int64, torch.float64]
            assert [t.requires_grad for t in (hidden, mask, ids, constant)] == [True] + [False] * 3
            assert torch.equal(ids, torch.arange(ids.numel()).reshape(ids.shape) + 2**40)


async def test_scalars_and_empty_tensors_are_handed_over(tmp_path: Path, where: Where) -> None:
    """Exact, with their gradients: parity."""
    torch.manual_seed(7)
    stages = [Scalars(), Scalars(), Scalars(), UsesScalar()]
    await check(chain_case(4, microbatches=4, stages=stages), where, tmp_path)


async def test_a_tensor_may_be_handed_over_twice_and_an_input_passed_on(
    tmp_path: Path, where: Where
) -> None:
    """Aliased outputs each get their gradient: within 1e-9 in fp64."""
    torch.manual_seed(8)
    stages = [stage.double() for stage in (nn.Linear(8, 8), Aliased(), Aliased(), Summed())]
    case = chain_case(4, microbatches=4, stages=stages, dtype=torch.float64)
    await check(case, where, tmp_path, within=1e-9)


@pytest.mark.parametrize("everything", [False, True], ids=["one input", "both inputs"])
async def test_an_input_that_was_handed_over_may_be_ignored(
    tmp_path: Path, where: Where, everything: bool
) -> None:
    """On odd microbatches: "no gradient" is handed back: parity, no hang."""
    torch.manual_seed(9)
    stages = [TwoHeads(), OddIgnores(everything=everything), TwoHeads(), OddIgnores()]
    steps = [Step({0: (torch.randn(10, 8),)}, torch.randn(10, 8))]  # sizes 3, 3, 2, 2
    await check(Case(stages, steps, microbatches=4), where, tmp_path)


async def test_a_reused_output_buffer_does_not_reach_what_was_handed_over(
    tmp_path: Path, where: Where
) -> None:
    """Hazard 23 on a local edge: later microbatches write where earlier ones came from: parity."""
    case = chain_case(4, microbatches=4, stages=[Reusing(), Reusing(), *linear_stages(2)])
    await check(case, where, tmp_path)


# -- what stages of one rank share -----------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("shared", ["a parameter", "a module"])
def test_stages_of_one_rank_that_share_weights_are_refused(shared: str, split: bool) -> None:
    """A tied head, or the same layers as two stages: named, before anything starts."""
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    if shared == "a parameter":
        last.weight = first.weight
    stages = [first, last if shared == "a parameter" else first]
    topology = r.Topology(2, chunks=2, placement="v")
    with pytest.raises(ValueError, match=r"stages 0 and 3 of rank 0 share the parameter 'weight'"):
        build_stages(stages, topology, 0, nn.functional.mse_loss, split=split)


def test_weights_tied_within_a_stage_are_not_refused() -> None:
    """They are one stage's, wherever else it has neighbours."""
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = first.weight
    stages = [nn.Sequential(first, last), nn.Linear(8, 8)]
    assert list(build_stages(stages, r.Topology(1, chunks=2), 0, None)) == [0, 1]


async def test_a_module_in_two_stages_is_in_training_mode_again_after_an_evaluation() -> None:
    """A Dropout that both stages of a rank use drops nothing in eval, and drops after it."""
    dropout = nn.Dropout(0.5)
    stages = [nn.Sequential(nn.Linear(8, 8), dropout) for _ in range(2)]

    async def main(world: r.World) -> None:
        async with r.Runtime(stages, world=world, config=r.Config(microbatches=2)) as runtime:
            await runtime.eval_step(torch.ones(4, 8))

    await r.run_local(1, main, topology=r.Topology(1, chunks=2))
    assert [module.training for stage in stages for module in stage.modules()] == [True] * 6

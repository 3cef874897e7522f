"""Several stages a rank, in a loop, a V or as listed: the bits are the unpartitioned model's."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.chunks import (
    EVERY_SEED,
    PLACEMENTS,
    STAGES,
    Joined,
    assert_chunk_parity,
    chunked,
    expected_tasks,
    on_one_rank,
    sgd,
    step,
)
from tests.runtime.parity import chain_case, differences, linear_stages
from tests.runtime.reference import Case, Step, run_reference

HINTS = ("bf", "bf-deep", "bfw", "bfw-deep", "f-priority")
LIMITS = (1, 2, "auto")
COUNTS = (1, 2, 5)
MATRIX = list(product((2, 3), PLACEMENTS, HINTS, LIMITS, COUNTS))
SAMPLED = [
    (2 + (i + j) % 2, PLACEMENTS[(i + j) % 3], hint, limit, COUNTS[(i + 2 * j) % 3])
    for (i, hint), (j, limit) in product(enumerate(HINTS), enumerate(LIMITS))
]
"""Every pair of two columns' values, not all at once."""

SHAKEN = [range(3), pytest.param(EVERY_SEED, marks=pytest.mark.slow)]
BF_OR_LONG_BFW = ["bf", pytest.param("bfw", marks=pytest.mark.slow)]
FEW = [range(1), pytest.param(range(1, 6), marks=pytest.mark.slow)]


def test_the_sample_has_every_pair() -> None:
    """Each value of one column meets each of another somewhere in the sample."""
    for a, b in combinations(range(5), 2):
        every = {(row[a], row[b]) for row in MATRIX}
        assert {(row[a], row[b]) for row in SAMPLED} == every, (a, b)


async def check(row: Sequence[Any], folder: Path, seeds: Sequence[int]) -> None:
    chunks, placement, hint, limit, count = row
    options = {"hint": hint, "limit": limit}
    case = chunked(chunks, placement, microbatches=count, options=options)
    runs = await assert_chunk_parity(case, folder, seeds=seeds, orders_differ=False)
    for run in runs:
        for rank, order in enumerate(run.orders):
            assert sorted(order) == expected_tasks(case, rank, count)


@pytest.mark.parametrize("row", SAMPLED, ids=lambda row: "-".join(map(str, row)))
async def test_every_hint_limit_and_count_gives_the_same_bits(
    tmp_path: Path, row: Sequence[Any]
) -> None:
    """Parity, each task once, the peak within limit + chunks."""
    await check(row, tmp_path, range(1))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("hint", HINTS)
async def test_the_whole_matrix_gives_the_same_bits(tmp_path: Path, hint: str) -> None:
    """As above, all combinations, another arrival order each."""
    for number, row in enumerate(MATRIX):
        if row[2] == hint:
            await check(row, tmp_path / str(number), range(1, 2))


@pytest.mark.parametrize("seeds", SHAKEN)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("chunks", [2, 3])
async def test_arrival_orders_change_the_dispatch_but_no_bit(
    tmp_path: Path, chunks: int, placement: str, seeds: range
) -> None:
    """Parity over the delays of many seeds; on some rank the orders really differ."""
    case = chunked(chunks, placement, microbatches=5, options={"hint": "bf"})
    await assert_chunk_parity(case, tmp_path, seeds=seeds)


@pytest.mark.parametrize("hint", HINTS)
async def test_one_rank_may_own_every_stage(tmp_path: Path, hint: str) -> None:
    """All edges are local and there is no link: parity."""
    case = on_one_rank(chain_case(3, microbatches=5, batch=10, options={"hint": hint, "limit": 2}))
    runs = await assert_chunk_parity(case, tmp_path, seeds=range(2), orders_differ=False)
    assert {len(run.orders) for run in runs} == {1}


@pytest.mark.parametrize("placement", ["v", pytest.param("loop", marks=pytest.mark.slow)])
async def test_free_accumulation_stays_within_rounding(tmp_path: Path, placement: str) -> None:
    """deterministic=False: 1e-9 in fp64, split or not, at a limit of 1."""
    for hint in ("f-priority", "bfw-deep"):
        options = {"hint": hint, "limit": 1, "deterministic": False}
        case = chunked(2, placement, microbatches=5, dtype=torch.float64, options=options)
        folder = tmp_path / hint
        await assert_chunk_parity(case, folder, seeds=range(1), within=1e-9, orders_differ=False)


# -- stage graphs ----------------------------------------------------------------------------------


ENCODERS = ((0, 2), (1, 3), (2, 4), (3, 4), (4, 5))
"""0 and 2, 1 and 3 are encoders; 4 joins them and 5 ends."""


@pytest.mark.parametrize("seeds", FEW)
@pytest.mark.parametrize("hint", BF_OR_LONG_BFW)
@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_two_encoders_on_chunks_train_as_one_model(
    tmp_path: Path, placement: str, hint: str, seeds: range
) -> None:
    """Each with inputs of its own, on two ranks; the join may be local to either: parity."""
    torch.manual_seed(1)
    stages = [*linear_stages(4), Joined(), Joined()]
    inputs = {0: (torch.randn(8, 8),), 1: (torch.randn(8, 8),)}
    where = (0, 1, 0, 1, 1, 0) if placement == "listed" else placement
    case = Case(
        stages,
        [Step(inputs, torch.randn(8, 8)), Step(inputs, torch.randn(8, 8))],
        4,
        edges=ENCODERS,
        make_optimizer=sgd,
        options={"hint": hint},
        chunks=3,
        placement=where,
    )
    await assert_chunk_parity(case, tmp_path, seeds=seeds, orders_differ=False)


async def test_two_encoders_of_one_rank_both_get_what_the_rank_is_given(tmp_path: Path) -> None:
    """Both sources on rank 0, with the same inputs: parity."""
    inputs = (torch.randn(8, 8),)
    case = Case(
        [*linear_stages(2), Joined(), Joined()],
        [Step({0: inputs, 1: inputs}, torch.randn(8, 8))],
        4,
        edges=((0, 2), (1, 2), (2, 3)),
        chunks=2,
        placement=(0, 0, 1, 1),
    )
    await assert_chunk_parity(case, tmp_path, seeds=range(4))


SKIPS = (*((s, s + 1) for s in range(5)), (0, 2), (1, 4), (3, 5))


@pytest.mark.parametrize("seeds", FEW)
@pytest.mark.parametrize("hint", BF_OR_LONG_BFW)
@pytest.mark.parametrize(
    ("chunks", "placement"),
    [(3, "loop"), (3, "v"), (2, (0, 1, 0, 2, 1, 2)), (6, "loop")],
    ids=["loop", "v", "listed", "one rank"],
)
async def test_skips_may_join_stages_of_one_rank(
    tmp_path: Path, chunks: int, placement: str | tuple[int, ...], hint: str, seeds: range
) -> None:
    """Local edges beside sent ones into and out of a stage, each with a copy of its own: parity."""
    torch.manual_seed(2)
    stages = [Joined() for _ in range(STAGES)]
    case = chain_case(STAGES, microbatches=4, stages=stages, edges=SKIPS, options={"hint": hint})
    case = replace(case, chunks=chunks, placement=placement)
    await assert_chunk_parity(case, tmp_path, seeds=seeds, orders_differ=False)


# -- several steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", FEW)
@pytest.mark.parametrize("hint", BF_OR_LONG_BFW)
@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_evaluations_and_accumulated_steps_leave_the_bits_alone(
    tmp_path: Path, placement: str, hint: str, seeds: range
) -> None:
    """Eval, train without update, eval, train, train: parity, also with the run without evals."""
    torch.manual_seed(3)
    steps = [
        step(6, training=False),
        step(8, update=False),
        step(5, training=False),
        step(12),
        step(7),
    ]
    plain = chunked(2, placement, microbatches=4, options={"hint": hint}, make_optimizer=sgd)
    case = replace(plain, steps=steps)
    training = run_reference(replace(plain, steps=[s for s in steps if s.training]))
    runs = await assert_chunk_parity(case, tmp_path, seeds=seeds, orders_differ=False)
    for run in runs:
        assert differences(training, [run.outcomes[n] for n in (1, 3, 4)]) == []
        assert set(run.outcomes[0].gradients.values()) == {None}, "an eval left gradients"


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("limit", [1, pytest.param("auto", marks=pytest.mark.slow)])
async def test_evaluations_return_the_outputs_where_the_last_stage_lives(
    tmp_path: Path, placement: str, limit: Any
) -> None:
    """In microbatch order and bit for bit, with M far past the bound; on other ranks nothing."""
    case = chunked(3, placement, microbatches=12, options={"limit": limit})
    case = replace(case, steps=[step(12, training=False)])
    expected = run_reference(case)[0].outputs
    for run in await assert_chunk_parity(case, tmp_path, seeds=range(2), orders_differ=False):
        assert [len(results[0].outputs) for results in run.results].count(12) == 1
        assert all(map(torch.equal, run.outcomes[0].outputs, expected))


@pytest.mark.parametrize("hint", ["bf", "bfw"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("frozen", [(0, 1, 2), (3, 4, 5), (1, 3), (0, 2, 3, 5)], ids=str)
async def test_chunks_may_be_frozen(
    tmp_path: Path, frozen: tuple[int, ...], placement: str, hint: str
) -> None:
    """A frozen stage beside a trainable one; local edges say "no gradient" too: parity."""
    stages = linear_stages(STAGES)
    for index in frozen:
        stages[index].requires_grad_(False)
    case = chunked(2, placement, microbatches=3, stages=stages, options={"hint": hint})
    for run in await assert_chunk_parity(case, tmp_path, seeds=range(1), orders_differ=False):
        for name, gradient in run.outcomes[0].gradients.items():
            assert (gradient is None) is (int(name.split()[1]) in frozen)

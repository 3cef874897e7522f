"""Stages in a graph on four ranks: two encoders with inputs of their own, and a skip."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity.graphs import encoders, skipping
from tests.runtime.parity import assert_parity

SEEDS = range(6)
HINTS = ("bf", "bfw")
SHAPES = ("even", pytest.param("odd", marks=pytest.mark.slow), "lengths")


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("hint", HINTS)
async def test_two_encoders_feed_one_language_stage(tmp_path: Path, hint: str, shapes: str) -> None:
    """Tokens with keywords on rank 0, patches on rank 1: parity over two steps of SGD."""
    await assert_parity(encoders(hint, shapes=shapes), tmp_path, seeds=SEEDS)


@pytest.mark.parametrize("hint", HINTS)
@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1), (2,)], ids=str)
async def test_an_encoder_may_be_frozen(tmp_path: Path, hint: str, frozen: tuple[int, ...]) -> None:
    """The other still trains; parity, and no gradient where none is wanted."""
    case = encoders(hint, frozen=frozen)
    for run in await assert_parity(case, tmp_path, seeds=SEEDS, orders_differ=False):
        for name, gradient in run.outcomes[-1].gradients.items():
            assert (gradient is None) == (int(name.split()[1]) in frozen), name


@pytest.mark.parametrize("hint", HINTS)
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("shapes", ["odd", "lengths"])
async def test_a_skip_beside_a_chain_joins_again(
    tmp_path: Path, hint: str, chunks: int, shapes: str
) -> None:
    """One output for two readers, whose gradients are summed: parity, across ranks and on one."""
    case = replace(skipping(hint, shapes=shapes), chunks=chunks)
    await assert_parity(case, tmp_path, seeds=SEEDS)

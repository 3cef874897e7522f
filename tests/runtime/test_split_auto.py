"""The automatic hint on running stages: those worth it are split, the others whole, in silence."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.chunks import assert_chunk_parity, chunked, sgd
from tests.runtime.parity import Run, assert_parity, chain_case, linear_stages
from tests.runtime.reference import Case, Step
from tests.runtime.test_split_fallback import HiddenReentrant, Hooked
from tests.runtime.test_split_hazards import SPLIT, WHOLE, kinds_of, microbatches_of, steps

AUTO = [{}, {"hint": "auto"}]
MICROBATCHES = 4


def silently(told: list[warnings.WarningMessage]) -> bool:
    """Whether nothing was said of a split."""
    return [str(w.message) for w in told if "split" in str(w.message)] == []


async def run(case: Case, folder: Path, *, seeds: range = range(2)) -> list[Run]:
    """Parity over the seeds, without a word about splits."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        runs = await assert_parity(case, folder, seeds=seeds, orders_differ=False)
    assert silently(told)
    return runs


@pytest.mark.parametrize("options", AUTO, ids=["no hint", "auto"])
async def test_layers_are_split_without_being_asked_for(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """F, I and W on every rank, over SGD steps of several sizes; parity."""
    torch.manual_seed(1)
    case = Case(linear_stages(3), steps(8, 12), MICROBATCHES, make_optimizer=sgd, options=options)
    for each in await run(case, tmp_path):
        assert kinds_of(each) == [SPLIT] * 3
        assert [microbatches_of(each, rank, "W") for rank in range(3)] == [[0, 1, 2, 3] * 2] * 3


class Words(nn.Module):
    """A table of words, large beside its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(100, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.table(tokens))


class Normed(nn.Module):
    """A block whose norm is light beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Scaled(nn.Module):
    """A user's module whose parameters are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


MIXED = [Words, Normed, Hooked, Scaled, nn.Tanh, lambda: nn.Linear(8, 8)]
MIXED_KINDS = [WHOLE, SPLIT, WHOLE, SPLIT, WHOLE, SPLIT]


def mixed_case(**options: Any) -> Case:
    """Six stages, of which some are worth a split, one is not, and one cannot be split."""
    torch.manual_seed(2)
    stages = [make() for make in MIXED]
    data = [Step({0: (torch.randint(0, 100, (8,)),)}, torch.randn(8, 8)) for _ in "ab"]
    return Case(stages, data, MICROBATCHES, make_optimizer=sgd, options=options)


async def test_stages_that_gain_nothing_or_cannot_run_whole_amid_the_others(
    tmp_path: Path,
) -> None:
    """B beside I and W, no warning, parity over SGD steps."""
    for each in await run(mixed_case(), tmp_path):
        assert kinds_of(each) == MIXED_KINDS


async def test_chunks_of_one_rank_are_judged_one_by_one(tmp_path: Path) -> None:
    """Two ranks of three stages each: every stage has the tasks that suit it; parity."""
    case = replace(mixed_case(), chunks=3)
    for each in await run(case, tmp_path):
        tasks = {task for order in each.orders for task in order}
        for stage, kinds in enumerate(MIXED_KINDS):
            assert {task[1] for task in tasks if int(task[0]) == stage} == kinds, f"stage {stage}"


async def test_whoever_asks_for_a_split_gets_it_and_is_told_where_it_cannot_be(
    tmp_path: Path,
) -> None:
    """As before: the table's stage is split, the hooked one warned of; parity."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        case = mixed_case(hint="bfw-deep")
        [each] = await assert_parity(case, tmp_path, seeds=range(1), orders_differ=False)
    [text] = [str(w.message) for w in told if w.category is RuntimeWarning]
    assert "the backward of stage 2 is not split" in text
    assert "has hooks" in text
    assert kinds_of(each) == [SPLIT, *MIXED_KINDS[1:]]


@pytest.mark.parametrize("make", [Hooked, HiddenReentrant])
async def test_what_is_found_while_it_runs_is_not_told_either(
    tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    """Hooks before the first step, a hidden reentrant checkpoint in it: B from then on; parity."""
    torch.manual_seed(3)
    stages = linear_stages(3)
    stages[1] = make()
    case = Case(stages, steps(8, 8, 8), MICROBATCHES, make_optimizer=sgd)
    [each] = await run(case, tmp_path, seeds=range(1))
    split_steps = 1 if make is HiddenReentrant else 0
    assert microbatches_of(each, 1, "W") == [0, 1, 2, 3] * split_steps
    assert microbatches_of(each, 1, "B") == [0, 1, 2, 3] * (3 - split_steps)


@pytest.mark.parametrize("placement", ["loop", "v", "listed"])
@pytest.mark.parametrize("limit", ["auto", 1])
async def test_chunks_agree_with_the_model(
    tmp_path: Path, placement: str, limit: int | str
) -> None:
    """Two chunks on three ranks, at the automatic limit and at the least; parity."""
    case = chunked(2, placement, microbatches=6, options={"limit": limit})
    for each in await assert_chunk_parity(case, tmp_path, seeds=range(2), orders_differ=False):
        assert kinds_of(each) == [SPLIT] * 3


@pytest.mark.slow
async def test_many_arrival_orders_give_the_same_bits(tmp_path: Path) -> None:
    """Twenty seeds of delays over mixed stages and SGD steps; the orders really differ."""
    case = replace(mixed_case(), options={"limit": 6})
    runs = await run(case, tmp_path, seeds=range(20))
    assert len({str(each.orders) for each in runs}) > 1


async def test_an_evaluation_between_changes_nothing(tmp_path: Path) -> None:
    """Stages are judged by the training steps; parity, and no gradient in between."""
    torch.manual_seed(4)
    given = [steps(8, training=training)[0] for training in (False, True, False, True)]
    case = Case(linear_stages(2), given, MICROBATCHES, make_optimizer=sgd)
    for each in await run(case, tmp_path):
        assert kinds_of(each) == [SPLIT] * 2


async def test_ranks_of_one_pipeline_may_differ_in_what_they_split(tmp_path: Path) -> None:
    """The hint is the same word on all; what it comes to is each stage's own affair; parity."""
    stages = [*linear_stages(1), Hooked(), *linear_stages(1)]
    case = chain_case(3, microbatches=MICROBATCHES, stages=stages)
    for each in await run(case, tmp_path):
        assert kinds_of(each) == [SPLIT, WHOLE, SPLIT]

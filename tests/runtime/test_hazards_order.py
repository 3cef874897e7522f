"""HAZARDS.md, one stage a rank: counts, shapes and orders of microbatches."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rrfp_async as r
from rrfp_async.arbiter import Arbiter
from tests.runtime.parity import assert_parity, chain_case, linear_stages, pipelined
from tests.runtime.reference import Case, Step


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
async def test_four_ranks_agree_with_the_model_on_few_microbatches(
    tmp_path: Path, microbatches: int
) -> None:
    """Hazard 1: parity with M = 1, 2, 3, 4 on four ranks."""
    case = chain_case(4, microbatches=microbatches)
    await assert_parity(case, tmp_path, orders_differ=microbatches > 1, send_most_s=0.01)


def test_a_step_of_no_microbatches_is_refused() -> None:
    """Hazard 1: M = 0 is a ValueError that names value, rule and remedy."""
    with pytest.raises(ValueError, match=r"microbatches=0 must be an int of at least 1: give"):
        r.Config(microbatches=0)


def _sequences(lengths: Sequence[int], *, batch: int) -> Step:
    inputs = r.Microbatches([torch.randn(batch, length, 8) for length in lengths])
    return Step({0: (inputs,)}, r.Microbatches([torch.randn(batch, n, 8) for n in lengths]))


async def test_the_sequence_length_may_differ_by_microbatch_and_step(tmp_path: Path) -> None:
    """Hazard 2: lengths 5, 9, 3, 7, others in the next step, the batch doubled: parity."""
    torch.manual_seed(3)
    steps = [_sequences([5, 9, 3, 7], batch=2), _sequences([4, 1, 8, 6], batch=4)]
    await assert_parity(Case(linear_stages(3), steps, microbatches=4), tmp_path)


async def test_uneven_batches_weigh_each_sample_once(tmp_path: Path) -> None:
    """Hazard 3: batches of 8 and 5 with M = 3: the sample-weighted mean, parity."""
    torch.manual_seed(4)
    steps = [Step({0: (torch.randn(n, 8),)}, torch.randn(n, 8)) for n in (8, 5)]
    case = Case(linear_stages(3), steps, microbatches=3)
    runs = await assert_parity(case, tmp_path)
    whole = case.steps[1].inputs[0][0]
    for stage in case.stages:
        whole = stage(whole)
    mean = float(nn.functional.mse_loss(whole.detach(), case.steps[1].target))
    assert runs[0].outcomes[1].loss == pytest.approx(mean, rel=1e-6)


async def test_a_batch_smaller_than_the_microbatches_is_refused(tmp_path: Path) -> None:
    """Hazard 3: 2 samples with M = 3 are a ValueError that names both."""
    case = chain_case(2, microbatches=3, batch=2)
    with pytest.raises(ValueError, match=r"batch of 2 samples cannot be split into 3"):
        await pipelined(case, tmp_path)


class ForcedBackwards(r.HintOrder):
    """Forwards as they come; backwards in one order, waiting for each."""

    def __init__(self, microbatches: Sequence[int]) -> None:
        self._order = list(microbatches)
        self._ready: list[r.TaskId] = []
        self._left: list[int] = []

    def begin_step(self, tasks: Sequence[r.TaskId]) -> None:
        self._ready, self._left = [], list(self._order)

    def add(self, task: r.TaskId) -> None:
        self._ready.append(task)

    def peek(self, admissible: r.Admissible) -> r.TaskId | None:
        forward = (t for t in self._ready if t.kind is r.TaskKind.F and admissible(t))
        backward = (
            t for t in self._ready if t.kind is r.TaskKind.B and t.microbatch == self._left[0]
        )
        return next(forward, next(backward, None))

    def commit(self, task: r.TaskId) -> None:
        self._ready.remove(task)
        if task.kind is r.TaskKind.B:
            self._left.remove(task.microbatch)


FORCED = {"deterministic": False, "hint": ForcedBackwards([3, 0, 2, 1]), "limit": 8}
"""It waits for the last microbatch's backward first: all forwards must have a place."""


async def test_backwards_in_a_forced_order_get_the_right_gradients(tmp_path: Path) -> None:
    """Hazard 9: B in order 3, 0, 2, 1 with the order freed: parity within 1e-9 in fp64."""
    case = chain_case(3, microbatches=4, dtype=torch.float64, options=FORCED)
    runs = await assert_parity(case, tmp_path, within=1e-9)
    for run in runs:
        for rank, order in enumerate(run.orders):
            assert [t for t in order if "B" in t] == [f"{rank}B{j}" for j in (3, 0, 2, 1)]


async def test_each_microbatch_gets_its_own_gradient_in_a_forced_order(tmp_path: Path) -> None:
    """Hazard 9: a parameter row that only microbatch j touches ends with the gradient of j."""
    torch.manual_seed(5)
    stages = [nn.Embedding(4, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)]
    steps = [Step({0: (torch.arange(4),)}, torch.randn(4, 8, dtype=torch.float64))]
    case = Case(stages, steps, microbatches=4, options=FORCED)
    await assert_parity(case, tmp_path, within=1e-9)


async def test_orders_freed_of_determinism_stay_within_rounding(tmp_path: Path) -> None:
    """deterministic=False may change the last bits only: 1e-9 in fp64."""
    case = chain_case(4, microbatches=6, batch=12, dtype=torch.float64)
    case = replace(case, options={"deterministic": False, "hint": "f-priority"})
    await assert_parity(case, tmp_path, within=1e-9, seeds=range(8))


@pytest.mark.parametrize("hint", ["bf", "fb", "b-priority", "f-priority"])
@pytest.mark.parametrize("limit", [1, 2, 32])
async def test_every_hint_and_limit_gives_the_same_bits(
    tmp_path: Path, hint: str, limit: int
) -> None:
    """The hint and the limit choose an order and nothing else: parity, peak within the limit."""
    case = chain_case(3, microbatches=5, batch=10, options={"hint": hint, "limit": limit})
    runs = await assert_parity(case, tmp_path, seeds=range(3), orders_differ=False)
    assert all(result.peak_in_flight <= limit for run in runs for [result] in run.results)


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """A full collection looks at what the test makes only, not at all of torch."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


async def test_collecting_garbage_at_every_dispatch_drops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_collections: None
) -> None:
    """Hazard 21: gc.collect() at every choice, 2 MB tensors: no handle is lost, parity."""
    choose = Arbiter.choose

    def collecting(self: Arbiter) -> Any:
        gc.collect()
        return choose(self)

    monkeypatch.setattr(Arbiter, "choose", collecting)
    torch.manual_seed(6)
    wide = 2 * 2**20 // 4 // 8
    stages = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]
    steps = [Step({0: (torch.randn(4 * wide, 8),)}, torch.randn(4 * wide, 8))]
    await assert_parity(Case(stages, steps, microbatches=4), tmp_path, send_most_s=0.03)

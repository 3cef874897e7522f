"""Cases with several stages a rank, and what must hold for each of their runs."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rrfp_async as r
from tests.runtime.parity import Run, assert_parity, chain_case, topology_of
from tests.runtime.reference import Case, Step

STAGES = 6
LISTED = {2: (0, 1, 0, 2, 2, 1), 3: (0, 0, 1, 1, 0, 1)}
"""By chunks: a placement of the six stages that is neither a loop nor a V."""

PLACEMENTS = ("loop", "v", "listed")
EVERY_SEED = range(20)


def chunked(chunks: int, placement: str, *, microbatches: int, **more: Any) -> Case:
    """Six stages in a chain, so many on each rank."""
    where = LISTED[chunks] if placement == "listed" else placement
    batch = more.pop("batch", 2 * microbatches)
    case = chain_case(STAGES, microbatches=microbatches, batch=batch, **more)
    return replace(case, chunks=chunks, placement=where)


def on_one_rank(case: Case) -> Case:
    """The same case, every stage on one rank: all edges are local."""
    return replace(case, chunks=len(case.stages), placement="loop")


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Moves the parameters far enough to be seen in the next step."""
    return torch.optim.SGD(parameters, lr=0.1)


def step(samples: int = 8, *shape: int, **more: Any) -> Step:
    """A training step on random vectors, or tensors `(samples, *shape)`."""
    size = (samples, *(shape or (8,)))
    return Step({0: (torch.randn(size),)}, torch.randn(size), **more)


def expected_tasks(case: Case, rank: int, microbatches: int) -> list[str]:
    """Every task of a training step on a rank, as words, sorted."""
    kinds = "FIW" if r.Config(microbatches=1, **_hint_of(case)).splits else "FB"
    return sorted(
        f"{stage}{kind}{j}"
        for stage in topology_of(case).stages_of(rank)
        for kind in kinds
        for j in range(microbatches)
    )


def _hint_of(case: Case) -> dict[str, Any]:
    """The case's hint, if it has one."""
    return {name: value for name, value in case.options.items() if name == "hint"}


async def assert_chunk_parity(
    case: Case, folder: Path, *, seeds: Iterable[int], orders_differ: bool = True, **more: Any
) -> list[Run]:
    """Parity over the seeds; within the bound where the limit is a number."""
    runs = await assert_parity(case, folder, seeds=seeds, orders_differ=orders_differ, **more)
    limit = case.options.get("limit", "auto")
    for run in runs:
        peaks = [result.peak_in_flight for results in run.results for result in results]
        assert limit == "auto" or max(peaks) <= limit + case.chunks, f"peaks {peaks}"
    return runs


class Joined(nn.Module):
    """A linear stage over the sum of what comes along its edges."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.linear(sum(tensors[1:], tensors[0])).tanh()

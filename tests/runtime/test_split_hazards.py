"""HAZARDS.md 12, 13, 29 and 30, and older rows again, with the backward split into I and W.

In one process, with W wherever nothing else is ready (bfw) and where a list says (zb-h1 binding).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.runtime.parity import Run, assert_parity, chain_case, differences, linear_stages
from tests.runtime.reference import Case, Step, run_reference
from tests.runtime.test_hazards_tensors import (
    Aliased,
    InPlace,
    Mixed,
    Mixing,
    OddIgnores,
    Shaped,
    Summed,
    Tail,
    TwoHeads,
)

SOME_SEEDS = range(2)
ALL_SEEDS = range(2, 22)
SPLIT, WHOLE = {"F", "I", "W"}, {"F", "B"}

BFW = {"hint": "bfw"}
ZB_H1 = {"hint": "zb-h1", "binding": True}
ZB_H1_HINT = {"hint": "zb-h1"}


LONG = pytest.param(ZB_H1_HINT, marks=pytest.mark.slow)


@pytest.fixture(params=[BFW, ZB_H1, LONG], ids=["bfw", "zb-h1 binding", "zb-h1 hint"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The hint, and whether it is law."""
    return request.param


@pytest.fixture(params=[BFW, pytest.param(ZB_H1, marks=pytest.mark.slow)], ids=["bfw", "zb-h1"])
def mostly(request: pytest.FixtureRequest) -> dict[str, Any]:
    """As `options`, the second only in the long run."""
    return request.param


@pytest.fixture(params=[SOME_SEEDS, pytest.param(ALL_SEEDS, marks=pytest.mark.slow)])
def seeds(request: pytest.FixtureRequest) -> range:
    """Delays: a few, or twenty others."""
    return request.param


def kinds_of(run: Run) -> list[set[str]]:
    """The kinds of tasks that each rank ran."""
    return [{task.lstrip("0123456789")[0] for task in order} for order in run.orders]


def microbatches_of(run: Run, rank: int, kind: str) -> list[int]:
    """The microbatches of a rank's tasks of one kind, as dispatched."""
    return [int(task.split(kind)[1]) for task in run.orders[rank] if kind in task]


async def assert_split_parity(
    case: Case, folder: Path, seeds: range, *, whole: tuple[int, ...] = (), **more: Any
) -> list[Run]:
    """Parity over all seeds; every rank ran I and W, those in `whole` B, if it was not void."""
    case = replace(case, options={**case.options, **more.pop("options")})
    runs = await assert_parity(case, folder, seeds=seeds, orders_differ=False, **more)
    trained = any(step.training for step in case.steps)
    for run in runs:
        for rank, kinds in enumerate(kinds_of(run)):
            expected = WHOLE if rank in whole else SPLIT
            if rank in whole and not kinds - {"F"}:  # nothing to differentiate, there or below
                expected = {"F"}
                assert not any(p.requires_grad for p in case.stages[rank].parameters())
            assert not trained or kinds == expected, f"rank {rank}"
    return runs


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Moves the parameters far enough to be seen in the next step."""
    return torch.optim.SGD(parameters, lr=0.1)


def steps(*sizes: int, shape: tuple[int, ...] = (8,), **more: Any) -> list[Step]:
    """Training steps with batches of these sizes."""
    return [Step({0: (torch.randn(n, *shape),)}, torch.randn(n, *shape), **more) for n in sizes]


class Gated(nn.Module):
    """Hazard 12: Linear, chunk, a * sin(b)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.linear(x).chunk(2, dim=-1)
        return a * b.sin()


async def test_a_gated_layer_is_right_with_w_put_off(
    tmp_path: Path, options: dict[str, Any], seeds: range
) -> None:
    """Hazard 12: parity over SGD steps: W comes before the optimizer."""
    torch.manual_seed(1)
    stages = [Gated() for _ in range(3)]
    case = Case(stages, steps(8, 8), microbatches=4, make_optimizer=sgd)
    runs = await assert_split_parity(case, tmp_path, seeds, options=options)
    for run in runs:
        for rank in range(3):
            assert microbatches_of(run, rank, "W") == [0, 1, 2, 3] * 2


class Recomputing(nn.Module):
    """Hazard 13: a block that is recomputed in the backward, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.counts: list[int] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recomputing":
        other = Recomputing()
        other.load_state_dict(self.state_dict())
        other.counts = self.counts
        return other

    def inner(self, x: Tensor) -> Tensor:
        self.counts.append(len(x))
        return self.block(x) + x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


async def test_a_checkpointed_stage_is_split_and_recomputed_once(
    tmp_path: Path, options: dict[str, Any], seeds: range
) -> None:
    """Hazard 13: parity with the split, the forward recomputed once for each microbatch."""
    torch.manual_seed(2)
    stages = [Recomputing() for _ in range(3)]
    case = Case(stages, steps(8, 8), microbatches=4, make_optimizer=sgd)
    await assert_split_parity(case, tmp_path, seeds, options=options)
    runs = 1 + len(seeds)
    assert [len(stage.counts) for stage in stages] == [2 * 4 * 2 * runs] * 3


def _ends_in_view(*, last: bool) -> list[nn.Module]:
    tails = [nn.Sequential(nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]
    return (
        [nn.Linear(8, 8), *tails] if last else [*tails, nn.Sequential(nn.Linear(8, 8), nn.Tanh())]
    )


@pytest.mark.parametrize("last", [False, True])
async def test_a_stage_may_end_in_a_layer_whose_output_is_a_view(
    tmp_path: Path, options: dict[str, Any], seeds: range, last: bool
) -> None:
    """Hazard 29: 3-D Linear at the end of every stage: parity."""
    torch.manual_seed(5)
    case = Case(_ends_in_view(last=last), steps(8, 6, shape=(5, 8)), 4, make_optimizer=sgd)
    await assert_split_parity(case, tmp_path, seeds, options=options)


class Doubled(torch.autograd.Function):
    """Counts its backwards."""

    backwards: list[int] = []  # noqa: RUF012 - shared by all, which is the point

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Doubled.backwards.append(len(gradient))
        return gradient * 2


class WithFunction(nn.Module):
    """Hazard 30: a custom Function between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Doubled.apply(self.first(x)))


async def test_the_backward_of_a_custom_function_runs_once(
    tmp_path: Path, options: dict[str, Any], seeds: range
) -> None:
    """Hazard 30: once for each microbatch and stage; parity."""
    torch.manual_seed(6)
    Doubled.backwards.clear()
    case = Case([WithFunction() for _ in range(3)], steps(8), microbatches=4)
    await assert_split_parity(case, tmp_path, seeds, options=options)
    assert len(Doubled.backwards) == 3 * 4 * (1 + len(seeds))


async def test_evaluations_between_leave_training_bitwise_unchanged(
    tmp_path: Path, options: dict[str, Any], seeds: range
) -> None:
    """Hazard 7: eval, train, eval, train with other sizes equals the run without evals."""
    torch.manual_seed(8)
    sizes = ((6, False), (8, True), (4, False), (12, True), (4, False))
    given = [steps(n, training=training)[0] for n, training in sizes]
    case = Case(linear_stages(3), given, microbatches=4, make_optimizer=sgd)
    training = run_reference(replace(case, steps=[s for s in given if s.training]))
    runs = await assert_split_parity(case, tmp_path, seeds, options=options)
    for run in runs:
        assert differences(training, [run.outcomes[1], run.outcomes[3]]) == []
        assert set(run.outcomes[0].gradients.values()) == {None}, "an eval left gradients"


async def test_gradients_accumulate_over_steps_without_an_update(
    tmp_path: Path, options: dict[str, Any], seeds: range
) -> None:
    """update=False twice, then an update, then a step from nothing: parity."""
    torch.manual_seed(9)
    updates = (False, False, True, True)
    given = [steps(8, update=update)[0] for update in updates]
    case = Case(linear_stages(3), given, microbatches=3, make_optimizer=sgd)
    await assert_split_parity(case, tmp_path, seeds, options=options)


def _partly(where: str) -> tuple[list[nn.Module], tuple[int, ...]]:
    """Stages, and those that have nothing to split."""
    stages = linear_stages(4)
    if where == "frozen in the middle":
        stages[2].requires_grad_(False)
        return stages, (2,)
    if where == "frozen first":
        stages[0].requires_grad_(False)
        return stages, (0,)
    if where == "without parameters":
        stages[1] = nn.Tanh()
        return stages, (1,)
    for stage in stages[1:]:
        stage.requires_grad_(False)
    return stages, (1, 2, 3)


@pytest.mark.parametrize(
    "where", ["frozen in the middle", "frozen first", "without parameters", "only the first"]
)
async def test_stages_without_trained_parameters_run_whole(
    tmp_path: Path, mostly: dict[str, Any], where: str
) -> None:
    """Hazard 6: nothing to split, no warning, parity."""
    stages, whole = _partly(where)
    case = chain_case(4, microbatches=4, stages=stages)
    await assert_split_parity(case, tmp_path, range(2), whole=whole, options=mostly)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
async def test_four_ranks_agree_with_the_model_on_few_microbatches(
    tmp_path: Path, options: dict[str, Any], microbatches: int
) -> None:
    """Hazard 1: parity with M = 1, 2, 3, 4 on four ranks."""
    case = chain_case(4, microbatches=microbatches)
    await assert_split_parity(case, tmp_path, range(2), options=options)


@pytest.mark.parametrize("limit", [1, 2, 16])
async def test_any_limit_will_do(tmp_path: Path, limit: int) -> None:
    """D counts to W: with room for one microbatch a W must run before the next F; parity."""
    case = replace(chain_case(3, microbatches=6, batch=12), options={"limit": limit})
    runs = await assert_split_parity(case, tmp_path, range(2), options=BFW)
    for run in runs:
        assert max(result.peak_in_flight for rank in run.results for result in rank) <= limit


async def test_a_free_accumulation_order_is_within_rounding(
    tmp_path: Path, options: dict[str, Any], seeds: range
) -> None:
    """deterministic=False in fp64: within 1e-9, whatever the order of the W's."""
    case = chain_case(4, microbatches=6, batch=12, dtype=torch.float64)
    options = {**options, "deterministic": False}
    await assert_split_parity(case, tmp_path, seeds, within=1e-9, options=options)


@pytest.mark.parametrize("way", ["mixed", "two heads", "in place", "transposed"])
async def test_stages_may_hand_over_what_they_like(
    tmp_path: Path, mostly: dict[str, Any], way: str
) -> None:
    """Hazards 4, 5 and 8, and in-place first operations, with the split: parity."""
    torch.manual_seed(10)
    stages: list[nn.Module] = {
        "mixed": lambda: [Mixed(), Mixing(), Tail()],
        "two heads": lambda: [TwoHeads(), OddIgnores(everything=True), *linear_stages(1)],
        "in place": lambda: [*linear_stages(1), InPlace(), InPlace()],
        "transposed": lambda: [Shaped("transpose"), Shaped("expand"), nn.Linear(8, 8)],
    }[way]()
    shape = (8, 8) if way == "transposed" else (8,)
    case = Case(stages, steps(10, shape=shape), microbatches=4)
    whole = (2,) if way == "mixed" else ()
    await assert_split_parity(case, tmp_path, range(2), whole=whole, options=mostly)


async def test_a_stage_may_emit_a_tensor_twice(tmp_path: Path, mostly: dict[str, Any]) -> None:
    """Aliased outputs: within 1e-9 in fp64."""
    torch.manual_seed(11)
    stages = [stage.double() for stage in (nn.Linear(8, 8), Aliased(), Aliased(), Summed())]
    case = chain_case(4, microbatches=4, stages=stages, dtype=torch.float64)
    await assert_split_parity(case, tmp_path, range(2), whole=(3,), within=1e-9, options=mostly)


async def test_a_graph_of_stages_is_split_too(tmp_path: Path, mostly: dict[str, Any]) -> None:
    """Two encoders and a skip over a stage: parity."""
    torch.manual_seed(12)
    stages = [*linear_stages(2), TwoInputs(), TwoInputs()]
    edges = ((0, 2), (1, 2), (1, 3), (2, 3))
    given = [Step({s: (torch.randn(8, 8),) for s in (0, 1)}, torch.randn(8, 8)) for _ in "ab"]
    case = Case(stages, given, microbatches=4, edges=edges, make_optimizer=sgd)
    await assert_split_parity(case, tmp_path, range(2), options=mostly)


class TwoInputs(nn.Module):
    """Joins what came over two edges."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.linear(a * 2 + b)

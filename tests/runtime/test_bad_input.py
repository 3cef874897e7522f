"""What does not fit is said clearly, before anything starts, and ends the step on every rank."""

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rrfp_async as r
from tests.runtime.parity import linear_stages
from tests.runtime.steps import Call, assert_told, evaluate, mse_loss, run_steps, train, whole

# -- refused where it is built -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"microbatches": 0}, ["microbatches=0", "at least 1", "give microbatches=1"]),
        ({"microbatches": 2.0}, ["microbatches=2.0", "must be an int"]),
        ({"microbatches": 1, "limit": 0}, ["limit=0", "at least 1", "give limit=1"]),
        ({"microbatches": 1, "hint": "1f1b?"}, ["'1f1b?'", "use one of", "bf", "f-priority"]),
        ({"microbatches": 1, "hint": 3}, ["3", "int", "is no hint order", "HintOrder"]),
        ({"microbatches": 1, "hint": None}, ["None", "NoneType", "HintOrder"]),
        ({"microbatches": 1, "deterministic": 1}, ["deterministic=1", "True or False"]),
        ({"microbatches": 1, "trace_dir": 5}, ["trace_dir=5", "path or None"]),
    ],
)
def test_a_bad_setting_is_refused_with_value_rule_and_remedy(
    settings: dict[str, Any], words: list[str]
) -> None:
    """Config names the value seen, the rule and what to give."""
    with pytest.raises(ValueError, match=r"\S") as told:
        r.Config(**settings)
    assert [word for word in words if word not in str(told.value)] == []


class TakesTarget(nn.Module):
    """A forward that wants a keyword the step keeps for itself."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return x + target


class TakesUpdate(nn.Module):
    """As `TakesTarget`."""

    def forward(self, x: Tensor, *, update: bool = False) -> Tensor:
        return x


def _foreign(_own: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


BUILDS: list[Any] = [
    ([], {}, ["rank 0", "0 stage modules", "2 stages", "fewer ranks"]),
    ([nn.Linear(8, 8)] * 2, {}, ["rank 0", "2 stage modules", "one module"]),
    (nn.ModuleList([]), {}, ["rank 0", "0 stage modules"]),
    ([lambda x: x], {}, ["rank 0", "function", "nn.Module"]),
    (TakesTarget(), {}, ["stage 0", "'target'", "reserves", "rename"]),
    (TakesUpdate(), {}, ["stage 0", "'update'", "reserves", "rename"]),
    (nn.Linear(8, 8), {"optimizer": _foreign}, ["rank 0", "2 parameters", "build it from their"]),
    (nn.Linear(8, 8), {"optimizer": 3}, ["int", "neither a torch optimizer nor"]),
]


@pytest.mark.parametrize(("stages", "settings", "words"), BUILDS)
async def test_a_runtime_that_does_not_fit_is_refused_and_ends_the_others(
    stages: Any, settings: dict[str, Any], words: list[str]
) -> None:
    """The constructor names what is wrong; run_local then ends the other ranks."""

    async def main(world: r.World) -> None:
        given = stages if world.rank == 0 else nn.Linear(8, 8)
        mine = settings if world.rank == 0 else {}
        runtime = r.Runtime(
            given, world=world, config=r.Config(microbatches=4), loss_fn=mse_loss, **mine
        )
        async with runtime:
            await runtime.train_step(whole(), target=whole())

    async with asyncio.timeout(5.0):
        with pytest.raises(ValueError, match=r"\S") as told:
            await r.run_local(2, main)
    assert [word for word in words if word not in str(told.value)] == []


def test_a_forward_with_target_is_fine_past_the_first_stage() -> None:
    """Only first stages take the step's keywords: elsewhere `target` is the module's own affair."""
    topology = r.Topology(2)

    async def main() -> None:
        async with r.local_world(2, topology) as worlds:
            config = r.Config(microbatches=1)
            r.Runtime(TakesTarget(), world=worlds[1], config=config, loss_fn=mse_loss)

    asyncio.run(main())


async def test_a_topology_of_another_size_is_refused() -> None:
    """A local_world of n ranks with a topology of m names both."""
    with pytest.raises(ValueError, match=r"topology has 3 ranks, n=2.*make them equal"):
        async with r.local_world(2, r.Topology(3)):
            pass


# -- refused by a step ---------------------------------------------------------------------------


def _call(*args: Any, **kwargs: Any) -> Call:
    return lambda runtime: runtime.train_step(*args, **kwargs)


FIRST_RANK_STEPS: list[Any] = [
    ("batch below the microbatches", _call(torch.ones(3, 8)), "3 samples cannot be split into 4"),
    ("no inputs", _call(), "rank 0 owns a stage that takes inputs and got none"),
    (
        "kwargs disagree",
        _call(x=torch.ones(8, 8), y=torch.ones(6, 8)),
        "keyword argument 'y' has 6 samples in dimension 0, the batch has 8",
    ),
    (
        "args disagree",
        _call(torch.ones(8, 8), torch.ones(9, 8)),
        "argument 1 has 9 samples in dimension 0, the batch has 8",
    ),
    ("no dimensions", _call(torch.tensor(1.0)), "holds no tensor with a batch dimension"),
    ("no tensor", _call(3), "holds no tensor with a batch dimension"),
    (
        "not splittable",
        _call(torch.ones(8, 8), [object()]),
        "argument 1[0] of type object cannot be split",
    ),
    (
        "microbatches disagree",
        _call(r.Microbatches([whole()] * 2), r.Microbatches([whole()] * 3)),
        "Microbatches of different lengths",
    ),
    ("an empty microbatch", _call(r.Microbatches([whole(), whole()[:0]])), "microbatch 1 is empty"),
]


@pytest.mark.parametrize(
    ("call", "message"),
    [case[1:] for case in FIRST_RANK_STEPS],
    ids=[c[0] for c in FIRST_RANK_STEPS],
)
async def test_bad_inputs_on_the_first_rank_end_the_step_on_all(call: Call, message: str) -> None:
    """Rank 0 raises a ValueError that names the values; the others a StepFailed that names it."""
    errors = await run_steps(call, train, train)
    assert_told(errors, 0, ValueError, message)


LAST_RANK_STEPS: list[Any] = [
    ("no target", _call(), {}, "owns the last stage, got no target"),
    ("short target", _call(target=torch.ones(7, 8)), {}, "target has 7 samples, the inputs have 8"),
    ("a list", _call(target=[object()]), {}, "target[0] of type object cannot be split"),
    (
        "other microbatches",
        _call(target=r.Microbatches([1, 2])),
        {},
        "target has 2 microbatches, the inputs have 4",
    ),
    ("no loss", train, {"loss_fn": None}, "has no loss_fn"),
]


@pytest.mark.parametrize(
    ("call", "settings", "message"),
    [case[1:] for case in LAST_RANK_STEPS],
    ids=[case[0] for case in LAST_RANK_STEPS],
)
async def test_bad_targets_on_the_last_rank_end_the_step_on_all(
    call: Call, settings: dict[str, Any], message: str
) -> None:
    """Rank 2 raises a ValueError that names the values; the others a StepFailed that names it."""
    errors = await run_steps(train, train, call, **settings)
    assert_told(errors, 2, ValueError, message)


def _vector_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean(1)


def _no_loss(output: Tensor, target: Tensor) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("loss_fn", "seen"), [(_vector_loss, "(2,)"), (_no_loss, "float")], ids=["vector", "number"]
)
async def test_a_loss_that_is_no_scalar_names_its_task(loss_fn: Any, seen: str) -> None:
    """The loss function's fault is told as the task 1F0's, with what it returned."""
    errors = await run_steps(train, train, loss_fn=loss_fn)
    assert_told(errors, 1, r.StepFailed, f"loss_fn returned {seen}, not a scalar tensor")
    assert {error.task for error in errors} == {"1F0"}


class Returns(nn.Module):
    """Returns what it is told."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *_: Any) -> Any:
        return self.value


@pytest.mark.parametrize("value", [object(), {"h": 1j}, (torch.ones(2), {3}), 1 << 64])
async def test_a_stage_that_returns_what_cannot_be_sent_names_its_task(value: Any) -> None:
    """A leaf that is neither tensor nor plain is told as the task 0F0's, with its type."""
    errors = await run_steps(train, train, stages=[Returns(value), *linear_stages(1)])
    assert_told(errors, 0, r.StepFailed, "stage 0 returned ")
    assert {error.task for error in errors} == {"0F0"}


@pytest.mark.parametrize("odd", [0, 1])
async def test_different_modes_on_two_ranks_are_told(odd: int) -> None:
    """train_step here and eval_step there: both ranks fail, and the message names both."""
    calls = [evaluate if rank == odd else train for rank in range(2)]
    errors = await run_steps(*calls)
    assert {type(error) for error in errors} == {r.StepFailed}
    for error in errors:
        assert "train_step" in str(error) or "eval_step" in str(error)
        assert "rank 0" in error.cause
        assert "rank 1" in error.cause
        assert "call the same on every rank" in error.cause


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("hint", {"hint": "bf"}, {"hint": "f-priority"}),
        ("limit", {"limit": 3}, {"limit": 4}),
        ("microbatches", {}, {"microbatches": 2}),
        ("deterministic", {}, {"deterministic": False}),
    ],
)
async def test_different_settings_on_two_ranks_are_named(
    name: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """The hello compares: the setting, both values and both ranks are named on every rank."""
    errors = await run_steps(train, train, train, options=[first, first, second])
    for error in errors:
        assert isinstance(error, r.StepFailed)
        assert f"{name} is" in error.cause
        assert "on rank 2" in error.cause
        assert "on rank 0" in error.cause


async def test_an_evaluation_that_asks_for_an_update_is_refused() -> None:
    """update= is train_step's."""

    async def call(runtime: r.Runtime) -> Any:
        return await runtime.eval_step(whole(), target=whole(), update=True)

    errors = await run_steps(call, evaluate)
    assert_told(errors, 0, ValueError, "update= is reserved for train_step")

"""Ranks that compute a stage together, in one process: HAZARD 16, parity, and failures.

Every rank of a group has the whole stage, so that what it comes to is the unpartitioned model's to
the bit; that they run the same tasks in the same order is what a collective would need.
"""

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rrfp_async as r
from rrfp_async.config import TP_PROTOCOLS
from rrfp_async.grid import tp_group
from tests.logs import records
from tests.runtime.parity import differences, order_of, own, shaken
from tests.runtime.reference import Case, Outcome, Step, run_reference
from tests.runtime.worlds import each_rank

ENDS_WITHIN_S = 10.0


def steps(count: int, rows: int = 8) -> list[Step]:
    draw = torch.Generator().manual_seed(3)
    batches = [torch.randn(2, rows, 8, generator=draw) for _ in range(count)]
    return [Step({0: (x,)}, y) for x, y in batches]


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)]


def frozen(stages: list[nn.Module], *which: int) -> list[nn.Module]:
    """The same stages, some without anything to train."""
    for stage in which:
        stages[stage].requires_grad_(False)
    return stages


class Branching(nn.Module):
    """Hands on one output that is used and one that is not, without a gradient of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 2.0).detach() if x.sum() > 0 else x * 1.0


CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "a chain": (Case(layers(2), steps(2), 6), {"pp": 2}),
    "three ranks a stage": (Case(layers(2), steps(1), 5), {"pp": 2, "tp": 3}),
    "two stages a rank in a v": (
        Case(layers(4), steps(2), 4, chunks=2, placement="v"),
        {"pp": 2, "chunks": 2, "placement": "v"},
    ),
    "nothing to train first": (Case(frozen(layers(3), 0), steps(2), 4), {"pp": 3}),
    "nothing to train last": (Case(frozen(layers(3), 2), steps(2), 4), {"pp": 3}),
    "nothing to train but last": (Case(frozen(layers(3), 0, 1), steps(2), 4), {"pp": 3}),
    "outputs without a gradient, now and then": (
        Case([layers(1)[0], nn.Sequential(*layers(1), Branching()), layers(1)[0]], steps(2), 8),
        {"pp": 3},
    ),
    "evaluation between": (
        Case(layers(2), [steps(1)[0], replace(steps(1)[0], training=False), *steps(2)], 4),
        {"pp": 2},
    ),
}


async def run(
    case: Case, topology: r.Topology, folder: Path, seed: int, **settings: Any
) -> list[Any]:
    """Every rank's outcomes, step by step, with delays drawn for each rank by itself."""
    torch.set_num_threads(1)

    async def main(world: r.World) -> list[Any]:
        stages = copy.deepcopy(list(case.stages))
        owned = world.topology.stages_of(world.place.pp)
        config = r.Config(microbatches=case.microbatches, trace_dir=folder, **settings)
        told = []
        async with r.Runtime(
            [stages[stage] for stage in owned],
            world=shaken(100 * seed + world.rank)(world),
            config=config,
            loss_fn=case.loss_fn,
        ) as runtime:
            for step in case.steps:
                run_one = runtime.train_step if step.training else runtime.eval_step
                result = await run_one(*step.inputs[0], target=step.target)
                told.append((result, *own(stages, owned)))
        return told

    return await r.run_local(topology.world_size, main, topology=topology)


def outcomes_of(told: Sequence[Any], topology: r.Topology, tp: int) -> list[Outcome]:
    """What the ranks of one column came to, put together."""
    ranks = [told[pp * topology.tp + tp] for pp in range(topology.pp)]
    last = ranks[topology.rank_of(topology.last_stage)]
    return [
        Outcome(
            result.loss,
            result.losses,
            result.outputs,
            {name: grad for rank in ranks for name, grad in rank[number][1].items()},
            {name: value for rank in ranks for name, value in rank[number][2].items()},
        )
        for number, (result, *_) in enumerate(last)
    ]


def assert_one_order(folder: Path, topology: r.Topology) -> None:
    for rank in range(topology.world_size):
        assert order_of(folder, rank) == order_of(folder, tp_group(topology, rank)[0]), rank


@pytest.mark.parametrize("protocol", TP_PROTOCOLS)
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (name, hint)
        for name, (case, _) in CASES.items()
        for hint in ("bf", "bfw", "1f1b")
        if hint != "1f1b" or case.chunks == 1
    ],
)
async def test_a_group_runs_one_order_and_comes_to_the_references_bits(
    name: str, protocol: str, hint: str, tmp_path: Path
) -> None:
    """HAZARD 16: every column bitwise the unpartitioned model's, whatever is late on one rank."""
    case, shape = CASES[name]
    topology = r.Topology(**{"tp": 2, **shape})
    expected = run_reference(case)
    for seed in range(2):
        told = await run(
            case, topology, tmp_path / str(seed), seed, hint=hint, tp_protocol=protocol
        )
        assert_one_order(tmp_path / str(seed), topology)
        for tp in range(topology.tp):
            assert differences(expected, outcomes_of(told, topology, tp)) == []


@pytest.mark.slow
@pytest.mark.parametrize("protocol", TP_PROTOCOLS)
async def test_fifty_drawings_of_delays_make_no_difference(protocol: str, tmp_path: Path) -> None:
    """HAZARD 16 in full: PP2 x TP2, 50 seeds."""
    case, topology = Case(layers(2), steps(1), 6), r.Topology(2, tp=2)
    expected = run_reference(case)
    orders = set()
    for seed in range(50):
        folder = tmp_path / str(seed)
        told = await run(case, topology, folder, seed, hint="bf", limit=6, tp_protocol=protocol)
        assert_one_order(folder, topology)
        assert differences(expected, outcomes_of(told, topology, 1)) == []
        orders.add((*order_of(folder, 0), *order_of(folder, 2)))
    assert len(orders) > 1


@pytest.mark.parametrize("protocol", TP_PROTOCOLS)
async def test_every_decision_is_recorded_with_its_number_wait_and_retries(
    protocol: str, tmp_path: Path
) -> None:
    """One `tp` record a task, in the order of dispatch; the result sums them up."""
    topology = r.Topology(2, tp=2)
    told = await run(CASES["a chain"][0], topology, tmp_path, 0, hint="bf", tp_protocol=protocol)
    for rank in range(4):
        found = [each for each in records(tmp_path, rank, "tp") if each["step"] == 1]
        assert [each["number"] for each in found] == list(range(12))
        dispatched = [each for each in records(tmp_path, rank, "dispatch") if each["step"] == 1]
        assert [each["task"] for each in found] == [each["task"] for each in dispatched]
        leads = tp_group(topology, rank)[0] if protocol == "leader" else None
        assert {each["leader"] for each in found} == {leads}
        report = told[rank][1][0].agreement
        assert report.decisions == 12
        assert report.wait_s == pytest.approx(sum(each["wait_s"] for each in found))
        assert report.retries == sum(each["retries"] for each in found)
    if protocol == "leader":
        assert sum(result.agreement.retries for rank in told for result, *_ in rank) == 0


async def test_a_rank_that_computes_alone_agrees_with_nobody(tmp_path: Path) -> None:
    """No records, no report, and agreeing costs nothing."""
    told = await run(CASES["a chain"][0], r.Topology(2), tmp_path, 0)
    assert [result.agreement for rank in told for result, *_ in rank] == [None] * 4
    assert records(tmp_path, 0, "tp") == []


async def test_what_a_rank_waits_for_its_group_is_coordination_and_not_blocking(
    tmp_path: Path,
) -> None:
    """The times of a step still sum to it; a rank that leads waits for nobody's answer."""
    topology = r.Topology(2, tp=2)
    told = await run(CASES["a chain"][0], topology, tmp_path, 0, tp_protocol="allgather")
    for rank in told:
        result = rank[1][0]
        parts = (result.compute_s, result.blocking_s, result.coordination_s, result.other_s)
        assert sum(parts) == pytest.approx(result.step_s)
        assert min(parts) >= 0.0
        assert result.coordination_s > 0.0


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("protocol", TP_PROTOCOLS)
async def test_a_failure_inside_a_group_is_told_to_every_member_then_to_all(
    protocol: str, rank: int
) -> None:
    """The first cause, wherever it is; nobody waits for a decision that does not come."""
    topology = r.Topology(2, tp=2)

    class Boom(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("told boom")

    async def main(world: r.World) -> None:
        stage = nn.Sequential(layers(2)[world.place.pp])
        if world.rank == rank:
            stage.append(Boom())
        config = r.Config(microbatches=4, tp_protocol=protocol)
        async with r.Runtime(
            stage, world=world, config=config, loss_fn=nn.functional.mse_loss
        ) as runtime:
            step = steps(1)[0]
            await runtime.train_step(*step.inputs[0], target=step.target)

    async with asyncio.timeout(ENDS_WITHIN_S):
        errors = await each_rank(4, main, topology=topology)
    for error in errors:
        assert isinstance(error, r.StepFailed)
        assert error.rank == rank
        assert "told boom" in error.cause


async def test_a_group_that_lacks_an_arrival_says_so_when_it_stalls(tmp_path: Path) -> None:
    """Which rank lacks what; and the others which decision they wait for."""
    topology = r.Topology(2, tp=2)

    async def main(world: r.World) -> None:
        slow = world.rank == 1
        delays = r.Delays(0, send_most_s=1e6 if slow else 0.0, task_most_s=0.0)
        config = r.Config(microbatches=2, stall_timeout_s=1.0)
        async with r.Runtime(
            layers(2)[world.place.pp],
            world=r.with_delays(world, delays),
            config=config,
            loss_fn=nn.functional.mse_loss,
        ) as runtime:
            step = steps(1, rows=8192)[0]  # too large to come with its header
            await runtime.train_step(*step.inputs[0], target=step.target)

    async with asyncio.timeout(ENDS_WITHIN_S):
        errors = await each_rank(4, main, topology=topology)
    told = str(errors[0])
    assert "activation 0 over 0->1 is not on ranks 3" in told


@pytest.mark.parametrize("protocol", ["", "ring", None, 1])
def test_an_unknown_protocol_is_refused(protocol: Any) -> None:
    """With what there is."""
    with pytest.raises(ValueError, match="must be one of leader, allgather"):
        r.Config(microbatches=1, tp_protocol=protocol)


async def test_a_budget_in_bytes_cannot_be_agreed_on_by_all_gathering() -> None:
    """Every rank measures its own; refused before anything starts."""
    config = r.Config(microbatches=1, tp_protocol="allgather", activation_budget_bytes=10_000)
    async with r.local_world(2, r.Topology(1, tp=2)) as worlds:
        with pytest.raises(ValueError, match="use tp_protocol='leader'"):
            r.Runtime(layers(1), world=worlds[0], config=config)


async def test_a_budget_in_bytes_holds_for_a_group_with_a_leader(tmp_path: Path) -> None:
    """The leader's measurements count; peaks are equal on its group, and parity holds."""
    case, topology = Case(layers(2), steps(2), 8), r.Topology(2, tp=2)
    told = await run(case, topology, tmp_path, 0, hint="bf", activation_budget_bytes=200)
    assert_one_order(tmp_path, topology)
    for tp in range(2):
        assert differences(run_reference(case), outcomes_of(told, topology, tp)) == []
    peaks = [[result.peak_in_flight for result, *_ in rank] for rank in told]
    assert peaks[0] == peaks[1]
    assert peaks[2] == peaks[3]


async def test_settings_of_other_protocols_do_not_start_together() -> None:
    """The difference is named."""

    async def main(world: r.World) -> None:
        protocol = TP_PROTOCOLS[world.rank]
        config = r.Config(microbatches=1, tp_protocol=protocol)
        async with r.Runtime(
            layers(1), world=world, config=config, loss_fn=nn.functional.mse_loss
        ) as runtime:
            step = steps(1)[0]
            await runtime.train_step(*step.inputs[0], target=step.target)

    async with asyncio.timeout(ENDS_WITHIN_S):
        errors = await each_rank(2, main, topology=r.Topology(1, tp=2))
    assert "tp_protocol is allgather on rank 1 and leader on rank 0" in str(errors[0])

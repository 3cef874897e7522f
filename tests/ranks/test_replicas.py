"""Replicas and ranks that share a stage, on real ranks: HAZARDS 17, ZeRO-1, and what goes wrong."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.logs import dispatched
from tests.ranks.conftest import Launch
from tests.ranks.hosts import run_all_here
from tests.ranks.launching import Job
from tests.ranks.plan import Fault, Plan
from tests.ranks.test_bits import WORDS, reference

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(240)]

WORKER = Path(__file__).with_name("worker_mesh.py")
ENDS_WITHIN_S = 200.0
WITHIN_FP32 = 1e-5
PEER_TIMEOUT_S = 3.0
GRACE_S = 5.0


def run(ranks: int, lines: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """What the example came to with each command line, without times and settings."""
    given = [[*WORDS, *words] for words in lines]
    results = run_all_here(ranks, given, timeout_s=ENDS_WITHIN_S)
    names = ("losses", "replica_grad_sha256")
    return [{name: result[name] for name in names} for result in results]


def assert_trains_as_the_reference(result: dict[str, Any], replicas: int) -> None:
    """The unpartitioned model's losses, but for the order of sums; replicas equal to the bit."""
    assert result["losses"] == pytest.approx(reference()["losses"], abs=WITHIN_FP32)
    assert len(result["replica_grad_sha256"]) == replicas
    assert len(set(result["replica_grad_sha256"])) == 1


def test_two_replicas_of_two_stages_train_as_one_model_in_any_order() -> None:
    """PP2 x DP2: replicas equal to the bit, and so are runs whose delays differ."""
    orders = [("auto",), ("bfw",), ("bf", "--chunks", "2")]
    lines = [("--dp", "2", "--hint", *order, "--delay-seed", s) for order in orders for s in "12"]
    runs = run(4, lines)
    for first, second in zip(runs[::2], runs[1::2], strict=True):
        assert_trains_as_the_reference(first, 2)
        assert first == second


def test_three_replicas_of_one_stage_average_alike() -> None:
    """A ring of three: every rank gets the same bits."""
    [result] = run(3, [("--dp", "3", "--batch", "24")])
    digests = result["replica_grad_sha256"]
    assert digests == digests[:1] * 3


@pytest.mark.parametrize(
    ("dp", "ranks", "settings"),
    [
        (1, 4, {(): "12345", ("--hint", "bfw"): "12", ("--chunks", "2", "--hint", "bf"): "12"}),
        (2, 8, {(): "12"}),
    ],
)
def test_ranks_that_share_a_stage_train_as_one_model(
    dp: int, ranks: int, settings: dict[tuple[str, ...], str], tmp_path: Path
) -> None:
    """HAZARD 16 on PP2 x TP2 (five seeds) and PP2 x TP2 x DP2, with torch's DTensor.

    Each rank is delayed by itself, yet its group runs one order and all runs are equal to the bit.
    """
    runs = [(more, seed) for more, seeds in settings.items() for seed in seeds]
    folders = [tmp_path / str(place) for place in range(len(runs))]
    grid = ("--tp", "2", "--dp", str(dp))
    lines = [
        (*grid, *more, "--delay-seed", seed, "--trace-dir", str(folder))
        for (more, seed), folder in zip(runs, folders, strict=True)
    ]
    results: dict[tuple[str, ...], list[dict[str, Any]]] = {more: [] for more in settings}
    for (more, _), result in zip(runs, run(ranks, lines), strict=True):
        results[more].append(result)
    for equal in results.values():
        assert_trains_as_the_reference(equal[0], dp)
        assert equal == equal[:1] * len(equal)
    for folder in folders:
        for rank in range(0, ranks, 2):
            assert dispatched(folder, rank) == dispatched(folder, rank + 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_zero1_trains_to_the_bits_of_the_plain_optimizer(ranks: int) -> None:
    """ZeroRedundancyOptimizer over the mesh's dp group: five steps of AdamW, PP1 and PP2."""
    plain, zero1 = run(ranks, [("--dp", "2"), ("--dp", "2", "--zero1")])
    assert zero1 == plain


@pytest.mark.parametrize("made_before", ["", "made-before"])
def test_the_mesh_has_the_grids_coordinates_and_its_groups_work(
    launch: Launch, made_before: str
) -> None:
    """Over a default process group of the program's own, or over ours; each rank has its groups."""
    words = ("2,2,2", made_before) if made_before else ("2,2,2",)
    job = launch(8, script=WORKER, words=words)
    assert job.wait(within_s=120) == [0], job.story()
    for rank in range(8):
        told = job.event(rank, "mesh")
        pp, dp, tp = rank // 4, rank // 2 % 2, rank % 2
        assert told["names"] == ["pp", "dp", "tp"]
        assert told["place"] == [pp, dp, tp]
        assert told["sums"] == [
            2 * (rank - 4 * pp) + 4,
            2 * (rank - 2 * dp) + 2,
            2 * (rank - tp) + 1,
        ]
    job.assert_orderly()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="puts threads on one CPU")
def test_a_process_that_ends_right_after_a_collective_ends_well(launch: Launch) -> None:
    """Its thread in gloo may be late to let go of the tensors, and must not meet the end."""
    job = launch(4, script=WORKER, words=("1,4,1", "leave"))
    assert job.wait(within_s=120) == [0], job.story()
    job.assert_orderly()


def test_a_plain_pipeline_makes_no_mesh_and_no_default_process_group(launch: Launch) -> None:
    """Nothing of torch.distributed's global state is touched."""
    job = launch(2, script=WORKER, words=("2,1,1",))
    assert job.wait() == [0], job.story()
    for rank in range(2):
        assert job.event(rank, "mesh") | {"names": None, "initialized": False} == job.event(
            rank, "mesh"
        )


@pytest.mark.parametrize(("grid", "ranks"), [("2,2,1", 4), ("2,1,2", 4), ("1,2,2", 4)])
def test_one_norm_over_pipeline_replicas_and_shards(launch: Launch, grid: str, ranks: int) -> None:
    """Clipped as `clip_grad_norm_` clips the whole model: norms and losses of three steps."""
    job = launch(ranks, script=WORKER, words=(grid, "clip"))
    assert job.wait(within_s=120) == [0], job.story()
    told = [job.event(rank, "clipped") for rank in range(ranks)]
    assert len({json.dumps([each["norms"], each["losses"]]) for each in told}) == 1
    assert told[0]["norms"] == pytest.approx(told[0]["reference_norms"], rel=WITHIN_FP32)
    assert told[0]["losses"] == pytest.approx(told[0]["reference_losses"], abs=WITHIN_FP32)
    job.assert_orderly()


def test_a_backward_that_fails_frees_the_replica_that_waits_for_it(launch: Launch) -> None:
    """Every rank is told the cause; the process ends in order though gloo has no abort."""
    job = launch(4, Plan(stages=2, dp=2, fault=Fault(rank=1, where="backward"), then="again"))
    job.wait()
    for failure in job.failures().values():
        assert failure["failed"]["rank"] == 1
        assert failure["failed"]["cause"] == "Boom: told backward"
    assert [job.event(rank, "refused")["number"] for rank in range(4)] == [0] * 4
    job.assert_nothing_left(within_s=PEER_TIMEOUT_S + GRACE_S)
    job.assert_orderly()


@pytest.mark.parametrize(("grid", "ranks"), [("2,1,2", 4), ("1,2,2", 4)])
def test_a_failure_on_a_rank_that_shares_a_stage_is_told_to_all(
    launch: Launch, grid: str, ranks: int
) -> None:
    """Its peer sits in a collective of torch's that nobody will join; it ends in order too."""
    job = launch(ranks, script=WORKER, words=(grid, "boom"))
    assert job.wait() == [0], job.story()
    for failure in job.failures().values():
        assert failure["failed"]["rank"] == ranks - 1
        assert failure["failed"]["cause"] == "RuntimeError: told boom"
    job.assert_nothing_left(within_s=GRACE_S)
    job.assert_orderly()


@pytest.mark.parametrize(("grid", "ranks"), [("1,1,2", 2), ("2,1,2", 4)])
def test_a_leader_that_dies_is_named_though_a_collective_breaks_first(
    launch: Launch, grid: str, ranks: int
) -> None:
    """First its peer hears that a connection closed; then, from the bus, whose and why."""
    job = launch(ranks, script=WORKER, words=(grid, "die"))
    assert job.wait(within_s=60) == [1], job.story()
    for rank in range(1, ranks):
        failed = job.event(rank, "failed")["failed"]
        assert failed["rank"] == 0, job.story()
        assert "its process died" in failed["cause"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_a_replica_that_dies_while_another_waits_for_it_is_named(
    launch: Launch, number: signal.Signals
) -> None:
    """It hangs in a forward, so the other is in its reduction; then it is struck."""
    fault = Fault(rank=1, where="hang")
    config = {"peer_timeout_s": PEER_TIMEOUT_S}
    job: Job = launch(2, Plan(stages=1, dp=2, fault=fault, config=config))
    job.wait_for(1, "hang")
    job.pids()
    struck = job.signal(1, number)
    ended = job.wait_ended([0], within_s=30)
    assert ended[0] - struck < PEER_TIMEOUT_S + GRACE_S
    assert job.event(0, "failed")["failed"]["rank"] == 1
    job.let_go(1)
    job.assert_nothing_left()
    assert job.wait() == [1]
    job.assert_orderly()

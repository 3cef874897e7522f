"""The virtual cluster with replicas: draws of their own, averaged together, one end."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from rrfp_async.config import TP_PROTOCOLS, Config
from rrfp_async.grid import coordinates
from rrfp_async.sim.cluster import VirtualCluster
from rrfp_async.sim.costs import draw_costs
from rrfp_async.sim.replicas import ReplicaTable, VirtualReplicas
from rrfp_async.sim.simulate import simulate
from rrfp_async.topology import Topology
from tests import logs
from tests.sim.guarded import clock, play
from tests.sim.tables import costs_of, even


@pytest.mark.parametrize("protocol", TP_PROTOCOLS)
def test_replicas_wait_for_one_another_at_the_end_only(
    protocol: Literal["leader", "allgather"], tmp_path: Path
) -> None:
    """With draws of their own: the slowest decides, its groups keep their order."""
    fast, slow = (
        draw_costs(
            stages=2, microbatches=5, profile="llm", jitter="J3", delay_s=0.001, seed=3, replica=r
        )
        for r in (0, 1)
    )
    config = Config(microbatches=5, tp_protocol=protocol, hint="bf", limit=4)
    alone = [VirtualCluster(costs, config).run_step().makespan_s for costs in (fast, slow)]
    topology = Topology(2, dp=2, tp=2)
    logged = dataclasses.replace(config, trace_dir=tmp_path)
    step = VirtualCluster((fast, slow), logged, topology).run_step()
    assert alone[0] != alone[1]
    assert step.makespan_s == pytest.approx(max(alone))
    for rank in range(0, topology.world_size, 2):
        tasks = logs.dispatched(tmp_path, rank)
        assert tasks == logs.dispatched(tmp_path, rank + 1)
        assert len(tasks) == 11
    for rank, report in enumerate(step.reports):
        place = coordinates(topology, rank)
        assert report.compute_s == pytest.approx((fast, slow)[place.dp].work_s(place.pp))


def test_every_stage_of_a_replica_is_averaged(tmp_path: Path) -> None:
    """R is each rank's last task, on the fast replica too."""
    tables = [costs_of(even(2, 2, forward_s=seconds)) for seconds in (1.0, 3.0)]
    config = Config(microbatches=2, trace_dir=tmp_path, hint="bf")
    VirtualCluster(tables, config, Topology(2, dp=2)).run_step()
    for rank in range(4):
        assert logs.dispatched(tmp_path, rank)[-1] == f"{rank // 2}R0"


def test_replicas_exchange_and_add_up_in_one_order() -> None:
    """When the last has come; twice in a row; the sum is a tensor of one's own."""

    async def main() -> list[Any]:
        table = ReplicaTable(3)

        async def member(place: int) -> tuple[Any, list[float], float]:
            replicas = VirtualReplicas(table, place)
            await asyncio.sleep(float(place))
            words = await replicas.gather([place, 7])
            own = torch.tensor([float(place), 1.0])
            total = await replicas.sum(own)
            assert total.data_ptr() != own.data_ptr()
            return words, total.tolist(), clock().time()

        return await asyncio.gather(*map(member, range(3)))

    assert play(main()) == [([(0, 7), (1, 7), (2, 7)], [3.0, 3.0], 2.0)] * 3


@pytest.mark.parametrize("hint", ["bf", "auto", "1f1b"])
def test_equal_replicas_take_no_longer_than_one(hint: str) -> None:
    """Averaging takes no time here, and its last one ends the step."""
    costs = costs_of(even(3, 4))
    config = Config(microbatches=4, hint=hint, limit=4)
    spans = [
        VirtualCluster(costs, config, Topology(3, dp=dp)).run_step().makespan_s for dp in (1, 2, 3)
    ]
    assert spans == [spans[0]] * 3


def test_a_result_takes_the_slowest_replica_for_bound_and_baseline() -> None:
    """Bound and 1F1B are of one column each."""
    fast, slow = costs_of(even(3, 4)), costs_of(even(3, 4, forward_s=2.0))
    config = Config(microbatches=4)
    both = simulate((fast, slow), config, Topology(3, dp=2, tp=2))
    one = simulate(slow, config)
    assert both.bound_s == one.bound_s
    assert both.speedup_vs_1f1b * both.makespan_s == pytest.approx(
        one.speedup_vs_1f1b * one.makespan_s
    )


@pytest.mark.parametrize(
    ("replicas", "saying"),
    [
        ([even(2, 3)], "1 costs were given for dp=2"),
        ([even(2, 3), even(3, 3)], "of 3 stages, the topology has 2"),
        ([even(2, 3), even(2, 4)], "3 and 4 microbatches"),
    ],
)
def test_costs_that_do_not_fit_the_replicas_are_refused(replicas: list[Any], saying: str) -> None:
    """Before anything runs."""
    with pytest.raises(ValueError, match=saying):
        VirtualCluster([*map(costs_of, replicas)], Config(microbatches=3), Topology(2, dp=2))

"""`Runtime.metrics()` counts what really happened, whenever it is asked."""

import asyncio
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rrfp_async as r
from rrfp_async.metrics import SECONDS, Histogram, Meter
from tests.runtime.worlds import each_rank

MICROBATCHES = 4


async def trained(tp: int = 1, **settings: Any) -> list[tuple[r.Metrics, r.StepResult]]:
    """Two steps of training and one of evaluation on two pipeline ranks."""

    async def main(world: r.World) -> tuple[r.Metrics, r.StepResult]:
        config = r.Config(microbatches=MICROBATCHES, hint="bf", **settings)
        async with r.Runtime(
            nn.Linear(8, 8), world=world, config=config, loss_fn=nn.functional.mse_loss
        ) as runtime:
            x = torch.ones(8, 8)
            for _ in range(2):
                result = await runtime.train_step(x, target=x)
            await runtime.eval_step(x, target=x)
            return runtime.metrics(), result

    return await r.run_local(2 * tp, main, topology=r.Topology(2, tp=tp))


async def test_tasks_and_steps_are_counted_by_kind_and_mode() -> None:
    """Every F and B of three steps, two of them with backwards; times add up to the results'."""
    for metrics, _ in await trained():
        assert metrics.counters['rrfp_steps_total{mode="train"}'] == 2
        assert metrics.counters['rrfp_steps_total{mode="eval"}'] == 1
        assert metrics.counters['rrfp_tasks_total{kind="F"}'] == 3 * MICROBATCHES
        assert metrics.counters['rrfp_tasks_total{kind="B"}'] == 2 * MICROBATCHES
        assert metrics.counters['rrfp_tasks_total{kind="W"}'] == 0
        forwards = metrics.histograms['rrfp_task_seconds{kind="F"}']
        assert forwards.count == sum(forwards.counts) == 3 * MICROBATCHES
        assert 0.0 < forwards.sum < 10.0
        assert metrics.histograms["rrfp_idle_seconds"].count == 5 * MICROBATCHES
        assert metrics.counters["rrfp_messages_sent_total"] > 2 * MICROBATCHES
        assert metrics.counters["rrfp_records_lost_total"] == 0
        assert metrics.gauges["rrfp_open_sends"] == metrics.gauges["rrfp_ready_tasks"] == 0


async def test_a_group_counts_what_agreeing_took() -> None:
    """As the results say."""
    told = await trained(tp=2, tp_protocol="allgather")
    assert all(metrics.counters["rrfp_tp_wait_seconds_total"] > 0.0 for metrics, _ in told)


async def test_rank_0_is_told_what_every_rank_did() -> None:
    """And only rank 0; no rank computed longer than its step took."""
    told = [result for _, result in await trained()]
    assert len(told[0].ranks) == 2
    assert told[1].ranks == ()
    assert told[0].ranks[0].compute_s == told[0].compute_s
    assert told[0].ranks[1].compute_s == told[1].compute_s


async def test_flat_numbers_are_for_any_monitoring() -> None:
    """A histogram becomes count, sum and mean, its labels kept."""
    metrics, _ = (await trained())[0]
    flat = metrics.as_dict()
    assert flat['rrfp_task_seconds_count{kind="F"}'] == 12
    mean = flat['rrfp_task_seconds_sum{kind="F"}'] / 12
    assert math.isclose(flat['rrfp_task_seconds_mean{kind="F"}'], mean)
    assert flat['rrfp_task_seconds_mean{kind="W"}'] == 0.0
    assert all(isinstance(value, int | float) for value in flat.values())


async def test_metrics_are_there_during_a_step_and_after_a_failure() -> None:
    """A monitoring task may ask at any time; before the Runtime is open it is told to open it."""
    seen: list[float] = []

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(seen) == 2:
                raise RuntimeError("told boom")
            seen.append(runtimes[0].metrics().gauges["rrfp_in_flight"])
            return x * 1.0

    runtimes: list[r.Runtime] = []

    async def main(world: r.World) -> None:
        runtime = r.Runtime(
            nn.Sequential(nn.Linear(8, 8), Asking()),
            world=world,
            config=r.Config(microbatches=MICROBATCHES),
            loss_fn=nn.functional.mse_loss,
        )
        runtimes.append(runtime)
        with pytest.raises(r.StateError, match="was not opened"):
            runtime.metrics()
        async with runtime:
            x = torch.ones(8, 8)
            try:
                await runtime.train_step(x, target=x)
            finally:
                seen.append(runtime.metrics().counters['rrfp_tasks_total{kind="F"}'])

    async with asyncio.timeout(10.0):
        [error] = await each_rank(1, main)
    assert isinstance(error, r.StepFailed)
    assert seen[0] >= 1.0
    assert seen[2] in (1.0, 2.0)


def test_a_histogram_puts_what_is_on_a_bound_below_it() -> None:
    """As Prometheus does; what is above all bounds is counted too."""
    held = Histogram()
    for value in (0.0, SECONDS[0], SECONDS[0] * 1.01, SECONDS[-1] + 1.0):
        held.observe(value)
    value = held.value
    assert (value.counts[0], value.counts[1], value.counts[-1], value.count) == (2, 1, 1, 4)
    assert value.sum == pytest.approx(2.01 * SECONDS[0] + SECONDS[-1] + 1.0)


def test_a_meter_that_watches_nothing_refuses() -> None:
    """The Runtime's was not opened."""
    with pytest.raises(r.StateError, match="async with Runtime"):
        Meter().snapshot()

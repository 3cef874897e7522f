"""`Runtime.metrics()` counts what really happened, whenever it is asked."""

import asyncio
import math
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rrfp_async as r
from rrfp_async.bus.base import Bus
from rrfp_async.bus.messages import Header
from rrfp_async.ids import Edge, Link, TaskId
from rrfp_async.metrics import SECONDS, Histogram, Meter, Traffic
from rrfp_async.world import Wires
from tests.bus.sockets import until
from tests.runtime.worlds import each_rank, rewired

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


def test_an_edge_without_tensors_is_no_transfer() -> None:
    """Its header is a message, and counted as one."""
    traffic = Traffic()
    traffic.count([])
    traffic.count([torch.zeros(3, dtype=torch.float64), torch.zeros(2, dtype=torch.bool)])
    assert (traffic.transfers, traffic.size_bytes) == (1, 26)


async def test_what_one_rank_sends_another_receives() -> None:
    """Activations in all three steps, gradients in two: 2 x 8 floats each, by direction."""
    first, last = (metrics.counters for metrics, _ in await trained())
    assert first["rrfp_transfers_sent_total"] == 3 * MICROBATCHES
    assert first["rrfp_transfers_received_total"] == 2 * MICROBATCHES
    assert first["rrfp_transfer_sent_bytes_total"] == 3 * MICROBATCHES * 64
    assert first["rrfp_transfer_received_bytes_total"] == 2 * MICROBATCHES * 64
    for there, here in (("sent", "received"), ("received", "sent")):
        for name in ("rrfp_transfers_{}_total", "rrfp_transfer_{}_bytes_total"):
            assert first[name.format(there)] == last[name.format(here)]


async def test_a_sum_over_tied_owners_is_a_task_too() -> None:
    """One R per step that updates, on both owners; an evaluation has none."""

    async def main(world: r.World) -> r.Metrics:
        layer = nn.Linear(8, 8, bias=False)
        nn.init.ones_(layer.weight)
        config = r.Config(microbatches=MICROBATCHES, hint="bf")
        async with r.Runtime(
            layer,
            world=world,
            config=config,
            loss_fn=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ) as runtime:
            x = torch.ones(8, 8)
            for _ in range(2):
                await runtime.train_step(x, target=x)
            await runtime.eval_step(x, target=x)
            return runtime.metrics()

    tied = r.Topology(2, tied=[{0: "weight", 1: "weight"}])
    for metrics in await r.run_local(2, main, topology=tied):
        assert metrics.counters['rrfp_tasks_total{kind="R"}'] == 2
        assert metrics.histograms['rrfp_task_seconds{kind="R"}'].sum > 0.0


@pytest.mark.parametrize("scaled", [True, False])
async def test_the_loss_scale_is_shown_where_there_is_one(scaled: bool) -> None:
    """That of the last update: it doubles after each, so the second used twice the first one's."""

    async def main(world: r.World) -> list[float | None]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        async with r.Runtime(
            nn.Linear(8, 8),
            world=world,
            config=r.Config(microbatches=MICROBATCHES),
            loss_fn=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            grad_scaler=scaler if scaled else None,
        ) as runtime:
            seen = [runtime.metrics().gauges.get("rrfp_gradient_scale")]
            x = torch.ones(8, 8)
            for _ in range(2):
                await runtime.train_step(x, target=x)
                seen.append(runtime.metrics().gauges.get("rrfp_gradient_scale"))
            return seen

    expected = [None, 8.0, 16.0] if scaled else [None, None, None]
    assert await r.run_local(2, main) == [expected, expected]


async def test_what_comes_before_its_step_is_held() -> None:
    """A header for a rank that waits for the step's announcement; nobody else holds anything."""
    buses: list[Bus] = []

    def keep(wires: Wires) -> Wires:
        buses.append(wires.bus)
        return wires

    async with r.local_world(2) as worlds, AsyncExitStack() as resources:
        first, second = [
            await resources.enter_async_context(
                r.Runtime(
                    nn.Linear(8, 8),
                    world=rewired(world, keep),
                    config=r.Config(microbatches=MICROBATCHES),
                    loss_fn=nn.functional.mse_loss,
                )
            )
            for world in worlds
        ]
        waiting = asyncio.create_task(second.train_step(target=torch.ones(8, 8)))
        buses[0].send_nowait(1, Header(0, Link(0, 1), 0, Edge(0, 1), TaskId.parse("0F0"), ()))
        await until(lambda: second.metrics().gauges["rrfp_messages_held"] > 0)
        assert second.metrics().gauges["rrfp_messages_held"] == 1
        assert first.metrics().gauges["rrfp_messages_held"] == 0
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


def test_the_text_for_prometheus_has_each_name_once_with_its_type() -> None:
    """Buckets are cumulative and end in the count; labels stand before the bound."""
    histogram = Histogram([0.5, 2.0])
    for value in (0.25, 0.25, 1.0, 8.0):
        histogram.observe(value)
    told = r.Metrics(
        {'a_total{kind="F"}': 1, 'a_total{kind="B"}': 2},
        {"b": 3.5},
        {'c{kind="F"}': histogram.value, "d": Histogram([1.0]).value},
    )
    assert told.to_prometheus().splitlines() == [
        "# TYPE a_total counter",
        'a_total{kind="F"} 1',
        'a_total{kind="B"} 2',
        "# TYPE b gauge",
        "b 3.5",
        "# TYPE c histogram",
        'c_bucket{kind="F",le="0.5"} 2',
        'c_bucket{kind="F",le="2.0"} 3',
        'c_bucket{kind="F",le="+Inf"} 4',
        'c_sum{kind="F"} 9.5',
        'c_count{kind="F"} 4',
        "# TYPE d histogram",
        'd_bucket{le="1.0"} 0',
        'd_bucket{le="+Inf"} 0',
        "d_sum 0.0",
        "d_count 0",
    ]


async def test_prometheus_is_told_every_name_once() -> None:
    """Of a real run: a name that came twice would make it refuse all."""
    metrics, _ = (await trained())[0]
    text = metrics.to_prometheus()
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) == len({line.split()[2] for line in types})
    assert 'rrfp_task_seconds_bucket{kind="F",le="+Inf"} 12\n' in text


def test_a_meter_that_watches_nothing_refuses() -> None:
    """The Runtime's was not opened."""
    with pytest.raises(r.StateError, match="async with Runtime"):
        Meter().snapshot()

"""The log of whole runs: every event is there, times add up, idle spans name what was planted."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rrfp_async as r
from rrfp_async.config import Config
from rrfp_async.ids import Link
from rrfp_async.sim.cluster import VirtualCluster
from rrfp_async.topology import Topology
from tests.logs import records
from tests.runtime.worlds import each_rank, gated
from tests.sim.tables import costs_of, even
from tests.trace.sums import Line, check_sums, spans

LEAST_S = 50e-6


def simulated(
    folder: Path,
    tables: dict[str, list[list[float]]],
    topology: Topology | None = None,
    **more: Any,
) -> None:
    """One step on the virtual cluster, logged."""
    costs = costs_of(tables)
    config = Config(microbatches=costs.microbatches, trace_dir=folder, **more)
    VirtualCluster(costs, config, topology).run_step()


class Slow(nn.Module):
    """A Linear that takes its time forwards."""

    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.forward_s = forward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_s)
        return self.linear(x)


async def trained(
    folder: Path,
    forward_s: list[float],
    *,
    microbatches: int = 4,
    world_of: Callable[[r.World], r.World] = lambda world: world,
    evaluate: bool = False,
    **options: Any,
) -> list[list[r.StepResult]]:
    """Two steps of real ranks in this process; every rank's results, or what it raised."""
    torch.manual_seed(1)
    stages = [Slow(seconds) for seconds in forward_s]
    batch = torch.randn(2 * microbatches, 4)

    async def main(world: r.World) -> list[r.StepResult]:
        config = r.Config(microbatches=microbatches, trace_dir=folder, **options)
        runtime = r.Runtime(
            stages[world.rank], world=world_of(world), config=config, loss_fn=nn.functional.mse_loss
        )
        async with runtime:
            step = runtime.eval_step if evaluate else runtime.train_step
            return [await step(batch, target=batch) for _ in range(2)]

    return await each_rank(len(forward_s), main)


def longest_idle(folder: Path, rank: int, step: int = 0) -> Line:
    """The span of a step that took most time."""
    idle = spans(folder, rank, "idle", step)
    return max(idle, key=lambda span: span["end_s"] - span["start_s"])


# -- what there is ----------------------------------------------------------------------------


async def test_a_run_s_log_holds_every_kind_of_line_in_its_place(tmp_path: Path) -> None:
    """First the run, then each step from its beginning to its end."""
    await trained(tmp_path, [0.0, 0.002])
    for rank in range(2):
        lines = records(tmp_path, rank)
        assert lines[0]["event"] == "run"
        assert lines[0] | {"host": "", "pid": 0} == {
            "event": "run",
            "schema": 2,
            "rank": rank,
            "pp": 2,
            "dp": 1,
            "tp": 1,
            "stages": 2,
            "owners": [0, 1],
            "owned": [rank],
            "edges": [[0, 1]],
            "hint": "auto",
            "limit": "auto",
            "microbatches": 4,
            "host": "",
            "pid": 0,
            "clock_offset_s": 0.0,
            "clock_error_s": 0.0,
            "simulated": False,
            "version": lines[0]["version"],
        }
        events = [line["event"] for line in lines]
        assert set(events) == {
            *("run", "step_begin", "step_end", "dispatch", "task", "transfer", "idle")
        }
        bounds = [event for event in events if event.startswith("step_")]
        assert bounds == ["step_begin", "step_end"] * 2
        assert events[1] == "step_begin"
        assert events[-1] == "step_end"
        steps = [line["step"] for line in lines[1:]]
        assert steps == sorted(steps)


async def test_what_step_end_tells_is_what_the_step_returned(tmp_path: Path) -> None:
    """The same numbers, the loss and the peak among them."""
    results = await trained(tmp_path, [0.001, 0.0])
    for rank, of_rank in enumerate(results):
        for result, line in zip(of_rank, records(tmp_path, rank, "step_end"), strict=True):
            for name in ("step_s", "compute_s", "blocking_s", "coordination_s", "other_s", "loss"):
                assert line[name] == pytest.approx(getattr(result, name), abs=1e-8), name
            assert line["peak_in_flight"] == result.peak_in_flight


async def test_both_ends_of_a_transfer_tell_of_it_once(tmp_path: Path) -> None:
    """Task, edge and bytes are equal, peers are each other; the receiver is not done later."""
    await trained(tmp_path, [0.0, 0.0])
    ends: dict[str, dict[tuple[int, str], Line]] = {"send": {}, "receive": {}}
    for rank in range(2):
        for line in records(tmp_path, rank, "transfer"):
            assert line["peer"] == 1 - rank
            key = (line["step"], line["task"])
            assert key not in ends[line["direction"]]
            ends[line["direction"]][key] = line
    assert len(ends["send"]) == 2 * 8
    assert ends["send"].keys() == ends["receive"].keys()
    for key, sent in ends["send"].items():
        received = ends["receive"][key]
        assert (
            (sent["edge"], sent["bytes"]) == (received["edge"], received["bytes"]) == ([0, 1], 32)
        )
        assert sent["start_s"] <= sent["end_s"]
        assert received["start_s"] <= received["end_s"] <= sent["end_s"] + 0.05


async def test_no_gradient_is_a_transfer_of_nothing_that_came_with_its_header(
    tmp_path: Path,
) -> None:
    """A stage that does not look at its input sends none back: a moment, 0 bytes, both ends."""

    class Blind(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.ones_like(x))

    async def main(world: r.World) -> None:
        stage = Blind(4, 4) if world.rank else nn.Linear(4, 4)
        config = r.Config(microbatches=1, trace_dir=tmp_path, hint="bf")
        async with r.Runtime(
            stage, world=world, config=config, loss_fn=nn.functional.mse_loss
        ) as runtime:
            await runtime.train_step(torch.ones(2, 4), target=torch.ones(2, 4))

    await each_rank(2, main)
    for rank, direction in enumerate(("receive", "send")):
        [back] = [line for line in records(tmp_path, rank, "transfer") if line["task"] == "1B0"]
        assert (back["direction"], back["bytes"], back["packed"]) == (direction, 0, True)
        assert back["start_s"] == back["end_s"]


async def test_an_evaluation_is_logged_as_one(tmp_path: Path) -> None:
    """Its steps tell that they do not train, and their parts sum up as others do."""
    await trained(tmp_path, [0.001, 0.0], evaluate=True)
    for rank in range(2):
        assert [line["training"] for line in records(tmp_path, rank, "step_begin")] == [False] * 2
    check_sums(tmp_path, 2, 2, wakes_s=0.005)


def test_a_simulated_log_says_so_and_has_the_same_kinds(tmp_path: Path) -> None:
    """Virtual seconds from 0, no clock to align."""
    simulated(tmp_path, even(3, 4, delay_s=0.5))
    for rank in range(3):
        run, *lines = records(tmp_path, rank)
        assert (run["simulated"], run["clock_offset_s"], run["clock_error_s"]) == (True, 0.0, 0.0)
        assert {line["event"] for line in lines} == {
            *("step_begin", "step_end", "dispatch", "task", "transfer", "idle")
        }
        assert lines[0]["time_s"] == 0.0


# -- the sums ---------------------------------------------------------------------------------


async def test_on_real_ranks_the_parts_sum_to_the_step_and_the_spans_to_the_parts(
    tmp_path: Path,
) -> None:
    """Within 0.1 %; short waits that are no span, and the loop's turns within one, apart."""
    await trained(tmp_path, [0.002, 0.004, 0.001], microbatches=6)
    check_sums(tmp_path, 3, 2, wakes_s=0.0005)


@pytest.mark.parametrize("hint", ["auto", "bf", "1f1b", "bfw"])
def test_in_virtual_time_idle_spans_are_the_blocking_time(tmp_path: Path, hint: str) -> None:
    """Exactly, and with them and the tasks every moment until the end is told."""
    tables = even(4, 6, delay_s=0.25)
    tables["forward_s"][2] = [3.0] * 6
    simulated(tmp_path, tables, hint=hint)
    check_sums(tmp_path, 4, 1, wakes_s=0.0)


def test_two_chunks_a_rank_sum_up_too(tmp_path: Path) -> None:
    """What stays on a rank is no transfer and no wait."""
    simulated(tmp_path, even(4, 4, delay_s=0.25), Topology(2, chunks=2))
    check_sums(tmp_path, 2, 1, wakes_s=0.0)
    assert {line["peer"] for line in records(tmp_path, 0, "transfer")} == {1}


# -- planted causes ---------------------------------------------------------------------------


def waits_of(line: Line) -> list[tuple[str, str, list[int], int]]:
    return [(w["task"], w["for"], w["edge"], w["rank"]) for w in line["waits"]]


def test_a_slow_stage_is_what_the_ranks_behind_it_wait_for(tmp_path: Path) -> None:
    """Stage 1 of four takes ten times as long: rank 2 waits for its activations, by that edge."""
    tables = even(4, 6)
    tables["forward_s"][1] = [20.0] * 6
    simulated(tmp_path, tables, hint="bf")
    line = longest_idle(tmp_path, 2)
    assert line["cause"] == "nothing ready"
    assert ("2F0", "activation", [1, 2], 1) in waits_of(line)
    in_the_middle = [span for span in spans(tmp_path, 2, "idle") if span["start_s"] > 30.0]
    named = {wait[2:] for span in in_the_middle for wait in map(_frozen, waits_of(span))}
    assert ((1, 2), 1) in named


def _frozen(wait: tuple[str, str, list[int], int]) -> tuple[Any, ...]:
    return (wait[0], wait[1], tuple(wait[2] or ()), wait[3])


def test_a_slow_link_is_the_edge_that_is_named(tmp_path: Path) -> None:
    """Gradients from stage 2 to 1 take long: rank 1 waits for 2B0's, on that edge."""
    tables = even(3, 4)
    tables["gradient_delay_s"][2] = [50.0] * 4
    simulated(tmp_path, tables, hint="bf")
    line = longest_idle(tmp_path, 1)
    assert waits_of(line)[0] == ("1B0", "gradient", [1, 2], 2)
    assert line["waits"][0]["of"] == "2B0"
    [sent] = [t for t in spans(tmp_path, 2, "transfer") if t["task"] == "2B0"]
    assert sent["end_s"] - sent["start_s"] == pytest.approx(50.0)
    assert line["end_s"] == pytest.approx(sent["end_s"])


def test_a_tight_limit_is_the_cause_with_its_bound_and_what_would_free_a_place(
    tmp_path: Path,
) -> None:
    """Rank 0 has forwards to run and may not: 1 of 1 are in flight until 1B0 has come back."""
    simulated(tmp_path, even(3, 4), hint="bf", limit=1)
    line = longest_idle(tmp_path, 0)
    assert (line["cause"], line["in_flight"], line["bound"]) == ("limit", 1, 1)
    assert line["ready"] == ["0F1", "0F2", "0F3"]
    assert waits_of(line) == [("0B0", "gradient", [0, 1], 1)]


def test_a_fixed_order_that_waits_for_its_next_task_says_so(tmp_path: Path) -> None:
    """1F1B's third task on rank 0 of two is 0B0: other tasks are ready, and it waits."""
    tables = even(2, 4)
    tables["gradient_delay_s"][1] = [9.0] * 4
    simulated(tmp_path, tables, hint="1f1b", binding=True)
    line = longest_idle(tmp_path, 0)
    assert line["cause"] == "fixed order"
    assert line["ready"][0] == "0F2"
    assert waits_of(line)[0] == ("0B0", "gradient", [0, 1], 1)


def test_a_rank_that_is_done_waits_for_the_others(tmp_path: Path) -> None:
    """The last stage has nothing more to do while the first one's backwards run."""
    tables = even(2, 2)
    tables["backward_input_s"][0] = [30.0] * 2
    simulated(tmp_path, tables, hint="bf")
    line = longest_idle(tmp_path, 1)
    assert (line["cause"], line["waits"], line["ready"]) == ("others", [], [])
    assert line["end_s"] == records(tmp_path, 1, "step_end")[0]["time_s"]


async def test_on_real_ranks_a_slow_stage_is_named(tmp_path: Path) -> None:
    """The middle stage takes 30 ms: the last rank waits for its activations."""
    await trained(tmp_path, [0.0, 0.03, 0.0])
    line = longest_idle(tmp_path, 2, step=1)
    assert waits_of(line)[0][1:] == ("activation", [1, 2], 1)


async def test_on_real_ranks_a_late_send_is_named_by_its_edge_and_its_span(tmp_path: Path) -> None:
    """The first activation is held for 0.2 s: rank 1's idle span and its transfer tell of it."""
    gate = asyncio.Event()

    def held(link: Link, sequence: int) -> bool:
        return link == Link(0, 1) and sequence == 0

    def late(world: r.World) -> r.World:
        return gated(world, gate, held) if world.rank == 0 else world

    asyncio.get_running_loop().call_later(0.2, gate.set)
    await trained(tmp_path, [0.0, 0.0], microbatches=1, world_of=late, hint="bf")
    line = longest_idle(tmp_path, 1)
    assert waits_of(line) == [("1F0", "activation", [0, 1], 0)]
    [receive] = [t for t in spans(tmp_path, 1, "transfer") if t["direction"] == "receive"]
    assert receive["end_s"] - receive["start_s"] > 0.1
    assert line["start_s"] <= receive["start_s"] < receive["end_s"] <= line["end_s"] + LEAST_S


async def test_in_evaluation_the_limit_counts_open_sends(tmp_path: Path) -> None:
    """Rank 0 may have one send open: it is held back by that, and says so."""
    gate = asyncio.Event()

    def late(world: r.World) -> r.World:
        return gated(world, gate, lambda link, number: number == 0) if world.rank == 0 else world

    asyncio.get_running_loop().call_later(0.2, gate.set)
    await trained(tmp_path, [0.0, 0.0], world_of=late, evaluate=True, limit=1)
    line = longest_idle(tmp_path, 0)
    assert (line["cause"], line["in_flight"], line["bound"]) == ("limit", 1, 1)

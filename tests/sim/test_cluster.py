"""The virtual cluster: the real Dispatchers run on it, and what a step on it comes to."""

import asyncio
import dataclasses
import gc
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rrfp_async.arbiter import Arbiter, Decision
from rrfp_async.config import Config
from rrfp_async.errors import StateError, StepFailed
from rrfp_async.hints import Admissible, DirectionPriority, RankedHint, RoundHint
from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.sim.cluster import VirtualCluster
from rrfp_async.sim.costs import draw_costs
from rrfp_async.sim.simulate import Result, bound_s, simulate
from rrfp_async.topology import Topology
from tests import logs
from tests.runtime.steps import run_steps, train
from tests.sim.event_simulation import event_simulation
from tests.sim.guarded import GuardedLoop, InterruptedLoop
from tests.sim.tables import STYLES, costs_of, drawn, even


def result_of(tables: dict[str, Any], *, dispatch_s: float = 0.0, **settings: Any) -> Result:
    """What `simulate` says of the tables, under `bf` unless another hint is given."""
    costs = costs_of(tables)
    config = Config(**{"microbatches": costs.microbatches, "hint": "bf", **settings})
    return simulate(costs, config, dispatch_s=dispatch_s)


def some(seed: int = 11, style: str = "random") -> dict[str, Any]:
    """Five stages, nine microbatches."""
    return drawn(random.Random(seed), 5, 9, style)


def records(folder: Path, rank: int) -> list[dict[str, Any]]:
    return logs.records(folder, rank, "dispatch")


def train_for_real(ranks: int, **options: Any) -> None:
    """A training step of four microbatches in a local_world, one Linear a rank."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        told = runner.run(run_steps(*[train] * ranks, options=options))
    assert [error for error in told if isinstance(error, BaseException)] == []


@pytest.fixture
def backwards_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arbiter that takes forwards first, of those the youngest; but for the 1F1B baseline."""
    choose = Arbiter.choose

    def youngest_first(self: Arbiter) -> Decision:
        decision = choose(self)
        if self._hint.fixed_peak is not None:
            return decision
        allowed = filter(self._backpressure.admissible(), self.ready)
        task = max(allowed, key=lambda t: (t.kind is TaskKind.F, t.microbatch), default=None)
        return dataclasses.replace(decision, task=task)

    monkeypatch.setattr(Arbiter, "choose", youngest_first)


# -- the same code as in a real run -----------------------------------------------------------


def test_patching_the_choice_changes_the_result(request: pytest.FixtureRequest) -> None:
    """There is no second scheduler (DESIGN 2)."""
    before = result_of(some(), limit=9)
    request.getfixturevalue("backwards_world")
    after = result_of(some(), limit=9)
    assert after.makespan_s > before.makespan_s + 0.1
    assert after.peak_in_flight != before.peak_in_flight


@pytest.mark.usefixtures("backwards_world")
def test_the_patched_choice_is_a_real_ranks_too(tmp_path: Path) -> None:
    """One stage, no timing in it: real and virtual rank dispatch the same, which is the patch's."""
    settings: dict[str, Any] = {"hint": "bf", "limit": 4}
    train_for_real(1, trace_dir=tmp_path / "real", **settings)
    result_of(even(1, 4), trace_dir=tmp_path / "virtual", **settings)
    for world in ("real", "virtual"):
        tasks = [record["task"] for record in records(tmp_path / world, 0)]
        assert tasks == ["0F3", "0F2", "0F1", "0F0", "0B0", "0B1", "0B2", "0B3"]


def test_a_log_holds_what_a_real_run_logs(tmp_path: Path) -> None:
    """Same fields, types and schema; in a fixed order, also the same tasks at the same places."""
    order: dict[str, Any] = {"hint": "1f1b", "binding": True}
    train_for_real(3, trace_dir=tmp_path / "real", **order)
    result_of(even(3, 4), trace_dir=tmp_path / "virtual", **order)
    timed = ("time_s", "waited_s", "ready", "passed_over", "reason")
    for rank in range(3):
        real, virtual = (records(tmp_path / world, rank) for world in ("real", "virtual"))
        assert len(real) == len(virtual) == 8
        for ours, theirs in zip(virtual, real, strict=True):
            assert {k: type(v) for k, v in ours.items()} == {k: type(v) for k, v in theirs.items()}
            assert {k: ours[k] for k in ours if k not in timed} == {
                k: theirs[k] for k in theirs if k not in timed
            }


def test_a_log_holds_virtual_seconds(tmp_path: Path) -> None:
    """Stage 1 waits two seconds for its first input, and again for what stage 0 does between."""
    result_of(even(2, 1, forward_s=1.5, delay_s=0.5), trace_dir=tmp_path)
    assert [(r["task"], r["waited_s"]) for r in records(tmp_path, 1)] == [("1F0", 2.0), ("1B0", 0)]
    assert [(r["task"], r["waited_s"]) for r in records(tmp_path, 0)] == [("0F0", 0), ("0B0", 4.5)]


def test_only_our_step_is_logged(tmp_path: Path) -> None:
    """The 1F1B beside it leaves no records."""
    result_of(even(2, 5), hint="gpipe", binding=True, trace_dir=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.jsonl", "rank1.jsonl"]
    tasks = " ".join(record["task"] for record in records(tmp_path, 0))
    assert tasks == "0F0 0F1 0F2 0F3 0F4 0B0 0B1 0B2 0B3 0B4"


# -- what a result says -----------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("hint", ["bf", "f-priority", "1f1b"])
def test_a_stage_computes_or_is_blocked(style: str, hint: str) -> None:
    """Compute is the stage's work, and with blocking the makespan."""
    tables = some(3, style)
    result = result_of(tables, hint=hint, limit=4)
    costs = costs_of(tables)
    for stage in range(5):
        assert result.compute_s[stage] == pytest.approx(costs.work_s(stage), abs=1e-9)
        spent_s = result.compute_s[stage] + result.blocking_s[stage]
        assert spent_s == pytest.approx(result.makespan_s, abs=1e-9)
    lost = sum(result.blocking_s) / (5 * result.makespan_s)
    assert result.blocking_fraction == pytest.approx(lost)
    assert result.bound_s == bound_s(costs) <= result.makespan_s + 1e-9


def test_the_bound_is_the_busiest_stage_after_its_first_input() -> None:
    """Stage 2 has 2 * 9 s of work; microbatch 1 comes through first, after 0.25 + 1 + 0 + 2 s."""
    tables = even(3, 2, forward_s=3.0, backward_s=6.0)
    tables["forward_s"][:2] = [[5.0, 0.25], [2.0, 2.0]]
    tables["activation_delay_s"][0] = [0.0, 1.0]
    assert bound_s(costs_of(tables)) == 0.25 + 1.0 + 2.0 + 18.0


def test_the_same_call_gives_the_same_result() -> None:
    """Also the same cluster's second step, and with hint objects, which keep their state."""
    for hint in (
        "bf",
        "gpipe",
        RoundHint(forward_first=True),
        DirectionPriority(forward_first=True),
    ):
        first, again = (
            dataclasses.replace(result_of(some(), hint=hint, limit=3), wall_s=0.0) for _ in "12"
        )
        assert first == again
        config = Config(microbatches=9, hint=hint, limit=3)
        cluster = VirtualCluster(costs_of(some()), config)
        steps = [cluster.run_step() for _ in range(2)]
        assert steps[0] == steps[1]
        assert steps[0].makespan_s == first.makespan_s


def test_a_hint_of_ones_own_is_simulated() -> None:
    """Any HintOrder, as docs/hints.md says."""

    class Oldest(RankedHint):
        """The lowest microbatch, whatever the direction."""

        def rank(self, task: TaskId) -> tuple[int, bool]:
            return task.microbatch, task.kind is TaskKind.F

    lists = [[(kind, j) for j in range(9) for kind in "BF"] for _ in range(5)]
    theirs = event_simulation(some(), lists, limit=3, ordered=True)
    result = result_of(some(), hint=Oldest(), limit=3)
    assert result.makespan_s == pytest.approx(theirs.makespan_s, abs=1e-6)
    assert result.peak_in_flight == theirs.peaks


@pytest.mark.parametrize(("hint", "kinds"), [("bf", 2), ("bfw", 3), ("auto", 3)])
def test_every_task_is_told_as_done(hint: str, kinds: int) -> None:
    """For a progress bar: ours and the baseline's."""
    done: list[None] = []
    config = Config(microbatches=9, hint=hint)
    simulate(costs_of(some()), config, done=lambda: done.append(None))
    assert len(done) == (kinds + 2) * 5 * 9


@pytest.mark.parametrize("chunks", [1, 2])
def test_without_a_hint_it_is_bfw_deep(tmp_path: Path, chunks: int) -> None:
    """The automatic hint: every stage of a cost model is split; the same tasks, the same times."""
    tables = drawn(random.Random(2), 3 * chunks, 8, "random")
    topology = Topology(3, chunks=chunks)
    steps = {}
    for name, hint in {"none": {}, "auto": {"hint": "auto"}, "deep": {"hint": "bfw-deep"}}.items():
        config = Config(microbatches=8, trace_dir=tmp_path / name, **hint)
        steps[name] = VirtualCluster(costs_of(tables), config, topology).run_step()
    logs = [[records(tmp_path / name, rank) for rank in range(3)] for name in steps]
    assert logs[0] == logs[1] == logs[2]
    assert steps["none"] == steps["auto"] == steps["deep"]
    assert {record["task"].lstrip("0123456789")[0] for record in logs[0][0]} == {"F", "I", "W"}


# -- dispatch cost ----------------------------------------------------------------------------


def test_a_dispatch_cost_comes_before_every_task() -> None:
    """One stage: twice per microbatch; it is neither compute nor blocking."""
    result = result_of(even(1, 6), dispatch_s=0.25)
    assert result.makespan_s == pytest.approx(6 * 3.0 + 12 * 0.25)
    assert result.compute_s == pytest.approx([18.0])
    assert result.blocking_s == pytest.approx([0.0])


def test_a_larger_dispatch_cost_slows_it_down_more() -> None:
    """A cost of nothing is none."""
    free = result_of(some(), limit=9)
    spans = [result_of(some(), dispatch_s=s, limit=9).makespan_s for s in (0.0, 0.01, 0.1, 1.0)]
    assert spans[0] == free.makespan_s
    assert spans == sorted(set(spans))


@pytest.mark.parametrize("dispatch_s", [0.5, 2.0, 10.0, 1000.0])
def test_a_dispatch_cost_may_exceed_all_work(dispatch_s: float) -> None:
    """A step on which something always happens has not stalled."""
    result = result_of(even(2, 1, forward_s=0.01, backward_s=0.02), dispatch_s=dispatch_s)
    assert result.makespan_s == pytest.approx(0.06 + 4 * dispatch_s)


@pytest.mark.parametrize("dispatch_s", [-0.1, float("nan"), float("inf")])
def test_a_bad_dispatch_cost_is_refused(dispatch_s: float) -> None:
    """Before anything runs, and not by a nonsensical makespan."""
    with pytest.raises(ValueError, match=f"{dispatch_s} must be"):
        result_of(even(2, 2), dispatch_s=dispatch_s)


# -- edges ------------------------------------------------------------------------------------


def test_one_stage_only_works() -> None:
    """No links; everything is its own work, delays lead nowhere."""
    result = result_of(even(1, 7, delay_s=5.0))
    assert (result.makespan_s, result.bound_s) == (21.0, 21.0)
    assert (result.ratio_to_bound, result.speedup_vs_1f1b) == (1.0, 1.0)
    assert (result.blocking_s, result.blocking_fraction) == ([0.0], 0.0)
    assert result.peak_in_flight == [1]


def test_one_microbatch_goes_there_and_back() -> None:
    """All tasks and transfers in a row."""
    result = result_of(even(4, 1, delay_s=0.5))
    assert result.makespan_s == pytest.approx(4 * 3.0 + 6 * 0.5)
    assert result.peak_in_flight == [1, 1, 1, 1]


def test_what_costs_nothing_blocks_nobody() -> None:
    """No time passes at all, so none is lost."""
    result = result_of(even(3, 4, forward_s=0.0, backward_s=0.0))
    assert (result.makespan_s, result.bound_s, result.ratio_to_bound) == (0.0, 0.0, 1.0)
    assert result.compute_s == result.blocking_s == [0.0] * 3
    assert result.blocking_fraction == 0.0


@pytest.mark.parametrize("microbatches", [1, 3])
def test_sixty_four_stages_run_as_simulated(microbatches: int) -> None:
    """Deep and short: fewer microbatches than stages."""
    tables = drawn(random.Random(microbatches), 64, microbatches, "random")
    begun = time.perf_counter()
    result = result_of(tables)
    assert time.perf_counter() - begun < 10.0
    theirs = event_simulation(tables, "bf", limit=None, ordered=True)
    assert result.makespan_s == pytest.approx(theirs.makespan_s, abs=1e-6)
    assert result.peak_in_flight == theirs.peaks


@pytest.mark.parametrize("task_s", [3600.0, 1e6, 1e7])
def test_tasks_may_take_days(task_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the makespan grows with the costs."""
    monkeypatch.setattr("rrfp_async.sim.cluster.VirtualLoop", GuardedLoop)
    result = result_of(even(2, 2, forward_s=task_s, backward_s=2 * task_s))
    assert result.makespan_s == pytest.approx(9 * task_s)


def test_many_ranks_log_with_few_open_files(tmp_path: Path, few_files: int) -> None:
    """A cluster of more ranks than a process may open files still writes every log."""
    result_of(even(few_files, 1), trace_dir=tmp_path)
    assert len(list(tmp_path.glob("rank*.jsonl"))) == few_files
    assert len(records(tmp_path, few_files - 1)) == 2


@pytest.fixture
def few_files() -> Iterator[int]:
    """A limit on open files, for the test only."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 100 + len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


# -- failures ---------------------------------------------------------------------------------


class Broken(RankedHint):
    """Ranks until it is asked for microbatch 2."""

    def rank(self, task: TaskId) -> int:
        return task.microbatch

    def peek(self, admissible: Admissible) -> TaskId | None:
        best = super().peek(admissible)
        if best is not None and best.microbatch == 2:
            raise ZeroDivisionError("a fault of the hint")
        return best


def test_a_step_that_fails_says_so_as_a_real_one() -> None:
    """As documented, a StepFailed with the first cause: not a group of them."""
    with pytest.raises(StepFailed, match="a fault of the hint"):
        result_of(even(3, 4), hint=Broken())


def test_a_failed_simulation_leaves_the_collector_as_it_was() -> None:
    """And a good one, on or off."""
    for failing in (True, False):
        try:
            result_of(even(2, 4), hint=Broken() if failing else "bf")
        except Exception:
            assert failing
        assert gc.isenabled()
    gc.disable()
    try:
        result_of(even(2, 4))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_ctrl_c_at_any_turn_ends_it_quietly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A KeyboardInterrupt and nothing else: no callback that fails, no task left behind."""
    monkeypatch.setattr("rrfp_async.sim.cluster.VirtualLoop", InterruptedLoop)
    cluster = VirtualCluster(costs_of(some(4, "grid")), Config(microbatches=9))
    for turn in range(0, 500, 7):
        monkeypatch.setattr(InterruptedLoop, "interrupted_at", turn)
        with pytest.raises(KeyboardInterrupt):
            cluster.run_step()
        assert caplog.messages == [], f"interrupted at turn {turn}"


def test_inside_a_running_loop_it_says_so() -> None:
    """One RuntimeError about the loop, and no coroutine that nobody awaited."""

    async def main() -> None:
        result_of(even(2, 2))

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with (
            pytest.raises(StateError, match="event loop") as raised,
            asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner,
        ):
            runner.run(main())
        told = str(raised.value)
        del raised
        gc.collect()
    assert [w for w in warned if "never awaited" in str(w.message)] == []
    assert "running" in told


def test_a_limit_below_a_fixed_orders_peak_is_refused() -> None:
    """Before the step, as for real ranks; the baseline takes its own."""
    costs = draw_costs(stages=4, microbatches=6, profile="llm", jitter="J0", delay_s=0.0, seed=0)
    with pytest.raises(ValueError, match="limit=3 is below 4"):
        simulate(costs, Config(microbatches=6, hint="1f1b", binding=True, limit=3))
    assert simulate(costs, Config(microbatches=6, limit=1)).speedup_vs_1f1b < 1.0

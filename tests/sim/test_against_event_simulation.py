"""The virtual cluster against an independent simulation: makespan, peaks, and every dispatch."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rrfp_async.cli import main
from rrfp_async.config import Config
from rrfp_async.sim.cluster import VirtualCluster
from rrfp_async.sim.simulate import simulate
from tests import logs
from tests.sim.event_simulation import (
    Outcome,
    Tables,
    Task,
    event_simulation,
    gpipe,
    one_f_one_b,
)
from tests.sim.tables import STYLES, costs_of, drawn, even, written

TOLERANCE_S = 1e-6
RULES = ("bf", "fb", "b-priority", "f-priority")
LISTS = ("1f1b", "gpipe")
SAMPLE, SEARCH = 24, 200  # the sample has every style with every limit


Ours = tuple[float, list[list[str]], list[int]]
"""Makespan, the tasks each rank dispatched, and peaks."""


@dataclass(frozen=True)
class Case:
    """A drawn step; its repr and `tables` are all that a replay needs."""

    seed: int
    hint: str
    ordered: bool
    binding: bool = False

    @property
    def random(self) -> random.Random:
        return random.Random(f"{self.seed}/{self.hint}/{self.ordered}")

    @property
    def style(self) -> str:
        return STYLES[self.seed % len(STYLES)]

    @property
    def tables(self) -> Tables:
        source = self.random
        return drawn(source, source.randint(1, 6), source.randint(1, 10), self.style)

    @property
    def limit(self) -> int:
        """Tight in three of four cases."""
        microbatches = len(self.tables["forward_s"][0])
        return (1, 2, 3, microbatches + self.seed % 3)[self.seed // len(STYLES) % 4]


def dispatched(folder: Path, stages: int) -> list[list[str]]:
    """What each rank's log says it dispatched."""
    return [logs.dispatched(folder, stage) for stage in range(stages)]


def simulated(tables: Tables, folder: Path, **settings: Any) -> Ours:
    """Makespan, orders and peaks as the virtual cluster has them."""
    costs = costs_of(tables)
    config = Config(microbatches=costs.microbatches, trace_dir=folder, **settings)
    step = VirtualCluster(costs, config).run_step()
    peaks = [report.peak_in_flight for report in step.reports]
    return step.makespan_s, dispatched(folder, costs.stages), peaks


def assert_equal(case: object, ours: Ours, theirs: Outcome) -> None:
    makespan_s, orders, peaks = ours
    assert orders == theirs.orders, f"other orders in {case}"
    assert peaks == theirs.peaks, f"other peaks in {case}"
    assert makespan_s == pytest.approx(theirs.makespan_s, abs=TOLERANCE_S, rel=0), case


def compare(case: Case, folder: Path) -> None:
    """One named hint both ways."""
    tables = case.tables
    settings = {"binding": case.binding, "limit": "auto" if case.binding else case.limit}
    ours = simulated(tables, folder, hint=case.hint, deterministic=case.ordered, **settings)
    theirs = event_simulation(
        tables, case.hint, limit=case.limit, ordered=case.ordered, binding=case.binding
    )
    assert_equal(case, ours, theirs)


def shuffled_lists(source: random.Random, stages: int, microbatches: int) -> list[list[Task]]:
    """For each stage all its tasks, in any order."""
    tasks = gpipe(microbatches)
    return [source.sample(tasks, len(tasks)) for _ in range(stages)]


def csv_of(lists: list[list[Task]], path: Path) -> str:
    """The lists in torch's format; returns the hint that reads them."""
    rows = [",".join(f"{s}{kind}{j}" for kind, j in row) for s, row in enumerate(lists)]
    path.write_text("\n".join(rows) + "\n")
    return f"csv:{path}"


def compare_lists(seed: int, folder: Path, *, ordered: bool, binding: bool) -> None:
    """Lists out of order, which only rank; or lists that some other draw came to, as they stand."""
    case = Case(seed, "lists", ordered, binding)
    tables, source = case.tables, case.random
    stages, microbatches = len(tables["forward_s"]), len(tables["forward_s"][0])
    lists = shuffled_lists(source, stages, microbatches)
    if binding:
        other = drawn(source, stages, microbatches, "random")
        ran = event_simulation(other, lists, limit=None, ordered=ordered)
        lists = [[(word[1], int(word[2:])) for word in row] for row in ran.orders]
    limit = case.limit
    settings = {"binding": binding, "limit": "auto" if binding else limit}
    hint = csv_of(lists, folder.with_suffix(".csv"))
    ours = simulated(tables, folder, hint=hint, deterministic=ordered, **settings)
    theirs = event_simulation(tables, lists, limit=limit, ordered=ordered, binding=binding)
    assert_equal((case, lists), ours, theirs)


ordered_or_free = pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "free"])


@ordered_or_free
@pytest.mark.parametrize("hint", RULES)
def test_rules_run_as_simulated(hint: str, ordered: bool, tmp_path: Path) -> None:
    """Rounds and priorities: with room for all, and at limits of 1, 2 and 3."""
    for seed in range(SAMPLE):
        compare(Case(seed, hint, ordered), tmp_path / str(seed))


@ordered_or_free
@pytest.mark.parametrize("hint", LISTS)
def test_binding_lists_run_as_simulated(hint: str, ordered: bool, tmp_path: Path) -> None:
    """1F1B and GPipe as they stand: only their own order counts, no limit."""
    for seed in range(SAMPLE):
        compare(Case(seed, hint, ordered, binding=True), tmp_path / str(seed))


@ordered_or_free
@pytest.mark.parametrize("binding", [False, True], ids=["ranking", "binding"])
def test_lists_out_of_order_run_as_simulated(ordered: bool, binding: bool, tmp_path: Path) -> None:
    """Microbatches out of order make the kept place and the accumulation order matter."""
    for seed in range(SAMPLE):
        compare_lists(seed, tmp_path / str(seed), ordered=ordered, binding=binding)


@pytest.mark.slow
@pytest.mark.timeout(600)
@ordered_or_free
@pytest.mark.parametrize("hint", RULES + LISTS)
def test_a_long_search_finds_no_difference(hint: str, ordered: bool, tmp_path: Path) -> None:
    """As above, over many more draws."""
    for seed in range(SAMPLE, SEARCH):
        compare(Case(seed, hint, ordered, binding=hint in LISTS), tmp_path / str(seed))


@pytest.mark.slow
@pytest.mark.timeout(600)
@ordered_or_free
@pytest.mark.parametrize("binding", [False, True], ids=["ranking", "binding"])
def test_a_long_search_of_lists(ordered: bool, binding: bool, tmp_path: Path) -> None:
    """As above, over many more lists."""
    for seed in range(SAMPLE, SEARCH):
        compare_lists(seed, tmp_path / str(seed), ordered=ordered, binding=binding)


@pytest.mark.parametrize("hint", RULES)
def test_sums_in_another_order_are_one_instant(hint: str, tmp_path: Path) -> None:
    """0.1 + 0.2 is not 0.3 in floats: a stage that frees then must still see what arrives then."""
    tables = even(2, 9, forward_s=0.1, backward_s=0.2)
    tables["forward_s"][1] = [0.3] * 9
    ours = simulated(tables, tmp_path, hint=hint, limit=9)
    assert_equal(hint, ours, event_simulation(tables, hint, limit=9, ordered=True))


def test_a_tensor_does_not_overtake(tmp_path: Path) -> None:
    """A link is FIFO: a short delay behind a long one arrives with it, not before."""
    tables = even(2, 3)
    tables["activation_delay_s"][0] = [10.0, 0.0, 0.0]
    ours = simulated(tables, tmp_path, hint="bf", limit=3)
    assert ours[1][1] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]
    assert_equal(tables, ours, event_simulation(tables, "bf", limit=3, ordered=True))


def test_delays_overlap() -> None:
    """A delay is latency, not occupancy: three tensors under way together cost one delay."""
    tables = even(2, 3, forward_s=1.0, backward_s=0.0, delay_s=0.0)
    tables["activation_delay_s"][0] = [100.0] * 3
    step = VirtualCluster(costs_of(tables), Config(microbatches=3, limit=3)).run_step()
    assert step.makespan_s == pytest.approx(104.0)


@pytest.mark.parametrize(
    ("hint", "options"),
    [
        ("bf", ["--limit", "2"]),
        ("fb", ["--limit", "99", "--free-order"]),
        ("b-priority", ["--limit", "1"]),
        ("f-priority", ["--limit", "3", "--free-order"]),
        ("1f1b", ["--binding"]),
        ("gpipe", ["--binding", "--free-order"]),
    ],
)
def test_the_command_line_says_what_was_simulated(
    hint: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`simulate --costs FILE --json`: makespan, peaks, and 1F1B's makespan behind the speedup."""
    tables = drawn(random.Random(hint), 5, 9, "grid")
    arguments = ["--costs", written(tables, tmp_path / "costs.json"), "--hint", hint, "--json"]
    assert main(["simulate", *arguments, *options]) == 0
    result = json.loads(capsys.readouterr().out)
    limit = int(options[1]) if options[0] == "--limit" else None
    theirs = event_simulation(
        tables,
        hint,
        limit=limit,
        ordered="--free-order" not in options,
        binding="--binding" in options,
    )
    baseline = event_simulation(tables, "1f1b", limit=None, ordered=True, binding=True)
    assert result["makespan_s"] == pytest.approx(theirs.makespan_s, abs=TOLERANCE_S, rel=0)
    assert result["peak_in_flight"] == theirs.peaks
    speedup = baseline.makespan_s / theirs.makespan_s
    assert result["speedup_vs_1f1b"] == pytest.approx(speedup, abs=TOLERANCE_S)


def test_a_dispatch_cost_is_a_longer_task() -> None:
    """It holds the rank before every task, as if each task took that much longer."""
    tables = drawn(random.Random(7), 4, 8, "random")
    longer = dict(tables)
    for name in ("forward_s", "weight_s"):
        longer[name] = [[cost + 0.05 for cost in row] for row in tables[name]]
    config = Config(microbatches=8, hint="bf", limit=8)
    result = simulate(costs_of(tables), config, dispatch_s=0.05)
    theirs = event_simulation(longer, "bf", limit=8, ordered=True)
    baseline = event_simulation(longer, "1f1b", limit=None, ordered=True, binding=True)
    assert result.makespan_s == pytest.approx(theirs.makespan_s, abs=TOLERANCE_S)
    speedup = baseline.makespan_s / theirs.makespan_s
    assert result.speedup_vs_1f1b == pytest.approx(speedup)


def test_the_1f1b_list_here_is_the_known_one() -> None:
    """Stage 1 of 3, four microbatches: one forward ahead, then in turn."""
    tasks = "".join(f"{kind}{j} " for kind, j in one_f_one_b(1, 3, 4)).strip()
    assert tasks == "F0 F1 B0 F2 B1 F3 B2 B3"

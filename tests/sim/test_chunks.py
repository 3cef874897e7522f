"""The virtual cluster with several stages a rank, against an independent simulation."""

import random
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rrfp_async.config import Config
from rrfp_async.sim.cluster import VirtualCluster
from rrfp_async.topology import Topology
from tests.sim.chunk_simulation import Rules, chunk_simulation, loop, v
from tests.sim.event_simulation import Outcome, Tables
from tests.sim.event_simulation import event_simulation as one_chunk_simulation
from tests.sim.tables import STYLES, costs_of, drawn, even
from tests.sim.test_against_event_simulation import TOLERANCE_S, assert_equal, dispatched

HINTS = {
    "bf": ("bf", False),
    "bf-deep": ("bf", True),
    "bfw": ("bfw", False),
    "bfw-deep": ("bfw", True),
    "fb": ("fb", False),
    "f-priority": ("f-priority", False),
    "b-priority": ("b-priority", False),
}
PLACEMENTS = ("loop", "v", "listed")
SAMPLE, SEARCH = 24, 100
NO_LIMIT = 10_000


@dataclass(frozen=True)
class Case:
    """A drawn step; its repr is all that a replay needs."""

    seed: int
    hint: str
    placement: str
    ordered: bool

    def draws(self) -> tuple[Tables, int, int, list[int]]:
        """Tables, ranks, chunks, and the rank of every stage."""
        source = random.Random(f"{self.seed}/{self.hint}/{self.placement}/{self.ordered}")
        ranks, chunks = source.randint(1, 4), source.randint(1, 3)
        tables = drawn(source, ranks * chunks, source.randint(1, 8), self.style)
        where = v(ranks, chunks) if self.placement == "v" else loop(ranks, chunks)
        if self.placement == "listed":
            where[1:] = source.sample(where[1:], len(where) - 1)
        return tables, ranks, chunks, where

    @property
    def style(self) -> str:
        return STYLES[self.seed % len(STYLES)]

    @property
    def limit(self) -> int:
        """Tight in three of four cases."""
        return (1, 2, 3, NO_LIMIT)[self.seed // len(STYLES) % 4]


def simulated(
    tables: Tables, topology: Topology, folder: Path | None, **settings: Any
) -> tuple[float, list[list[str]], list[int]]:
    """Makespan, orders and peaks as the virtual cluster has them."""
    costs = costs_of(tables)
    config = Config(microbatches=costs.microbatches, trace_dir=folder, **settings)
    step = VirtualCluster(costs, config, topology).run_step()
    orders = [] if folder is None else dispatched(folder, topology.world_size)
    return step.makespan_s, orders, [report.peak_in_flight for report in step.reports]


def both(case: Case, folder: Path) -> tuple[tuple[float, list[list[str]], list[int]], Outcome]:
    tables, ranks, chunks, where = case.draws()
    placement = tuple(where) if case.placement == "listed" else case.placement
    topology = Topology(ranks, chunks=chunks, placement=placement)
    settings = {"hint": case.hint, "limit": case.limit, "deterministic": case.ordered}
    ours = simulated(tables, topology, folder, **settings)
    hint, deep = HINTS[case.hint]
    limit = None if case.limit == NO_LIMIT else case.limit
    return ours, chunk_simulation(tables, where, Rules(hint, deep, limit, case.ordered))


def compare(case: Case, folder: Path) -> Outcome:
    """Every dispatch, the peaks and the makespan are equal; no peak passes limit + C."""
    ours, theirs = both(case, folder)
    assert_equal(case, ours, theirs)
    return theirs


ordered_or_free = pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "free"])
placed = pytest.mark.parametrize("placement", PLACEMENTS)


@ordered_or_free
@pytest.mark.parametrize(
    ("hint", "placement"),
    [*product(("bf", "bf-deep"), ("loop", "v")), ("bfw", "listed"), ("bfw-deep", "v")],
)
def test_chunks_run_as_simulated(hint: str, placement: str, ordered: bool, tmp_path: Path) -> None:
    """1 to 3 chunks on 1 to 4 ranks, limits of 1, 2, 3 and none, with and without ties."""
    for seed in range(SAMPLE):
        case = Case(seed, hint, placement, ordered)
        _, _, chunks, _ = case.draws()
        peaks = compare(case, tmp_path / str(seed)).peaks
        assert max(peaks) <= case.limit + (chunks if chunks > 1 else 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@ordered_or_free
@placed
@pytest.mark.parametrize("hint", list(HINTS))
def test_a_long_search_finds_no_difference(
    hint: str, placement: str, ordered: bool, tmp_path: Path
) -> None:
    """As above, over many more draws and the other rules."""
    for seed in range(SAMPLE, SEARCH):
        compare(Case(seed, hint, placement, ordered), tmp_path / str(seed))


def test_the_two_simulations_agree_on_one_chunk() -> None:
    """With one stage a rank this one is the other: orders, peaks and makespan."""
    for seed in range(SAMPLE):
        source = random.Random(seed)
        tables = drawn(source, source.randint(1, 5), 6, STYLES[seed % len(STYLES)])
        for hint in ("bf", "fb", "b-priority", "f-priority"):
            limit, ordered = source.choice([1, 2, 3, None]), source.random() < 0.5
            where = list(range(len(tables["forward_s"])))
            mine = chunk_simulation(tables, where, Rules(hint, False, limit, ordered))
            assert mine == one_chunk_simulation(tables, hint, limit=limit, ordered=ordered)


# -- single facts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["loop", "v"])
def test_a_local_edge_takes_no_time(placement: str) -> None:
    """One microbatch through 2 ranks and 2 chunks: F 1 s, B 2 s a stage, and the edges between."""
    tables = even(4, 1, delay_s=10.0)
    topology = Topology(2, chunks=2, placement=placement)
    sent = sum(not topology.is_local(edge) for edge in topology.graph)
    assert sent == {"loop": 3, "v": 2}[placement]
    makespan_s, _, peaks = simulated(tables, topology, None, hint="bf")
    assert makespan_s == pytest.approx(4 * 3.0 + 2 * sent * 10.0)
    assert peaks == [2, 2]


def test_one_rank_with_all_stages_is_never_idle() -> None:
    """All work is on it, whatever the delays say, with any hint and limit."""
    tables = drawn(random.Random(1), 3, 5, "delayed")
    work_s = sum(costs_of(tables).work_s(stage) for stage in range(3))
    for hint in HINTS:
        for limit in (1, 3, "auto"):
            makespan_s, _, _ = simulated(
                tables, Topology(1, chunks=3), None, hint=hint, limit=limit
            )
            assert makespan_s == pytest.approx(work_s, abs=TOLERANCE_S)


def test_deep_forwards_finish_what_is_begun(tmp_path: Path) -> None:
    """One rank, two chunks, no limit in the way: the higher chunk's forward comes at once."""
    tables = even(2, 3)
    topology = Topology(1, chunks=2)
    _, [low], _ = simulated(tables, topology, tmp_path / "bf", hint="bf", limit=9)
    _, [deep], _ = simulated(tables, topology, tmp_path / "deep", hint="bf-deep", limit=9)
    assert low[:4] == ["0F0", "0F1", "0F2", "1F0"]
    assert deep == [
        "0F0",
        "1F0",
        "1B0",
        "0F1",
        "0B0",
        "1F1",
        "1B1",
        "0F2",
        "0B1",
        "1F2",
        "1B2",
        "0B2",
    ]


def test_the_kept_places_carry_the_oldest_through_all_chunks(tmp_path: Path) -> None:
    """Limit 1, three chunks of one rank: the bound is 4, and one microbatch at a time goes in."""
    tables = even(3, 2)
    topology = Topology(1, chunks=3)
    _, [order], [peak] = simulated(tables, topology, tmp_path, hint="f-priority", limit=1)
    assert peak <= 4
    assert order[:3] == ["0F0", "1F0", "2F0"]


def test_a_link_carries_activations_and_gradients_in_line(tmp_path: Path) -> None:
    """In a loop 1=>0 has both: a quick gradient does not overtake a slow activation before it."""
    tables = even(4, 2, backward_s=0.5)
    tables["activation_delay_s"][1] = [50.0, 50.0]
    topology = Topology(2, chunks=2)
    ours = simulated(tables, topology, tmp_path, hint="bf", limit=9)
    assert_equal("in line", ours, chunk_simulation(tables, loop(2, 2), Rules("bf", False, 9, True)))

"""One training step of a chain in chunks, simulated from the rules alone, as `event_simulation`.

Nothing of rrfp_async. Beyond that file's rules: several stages a rank, an edge between two of them
takes no time, all else between two ranks shares their FIFO links; docs/design.md 6 with C chunks;
and the backward whole or in I and W.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.sim.event_simulation import INSTANT_S, Outcome, Tables

Task = tuple[int, str, int]
"""Stage, kind (F, B, I or W) and microbatch."""


def loop(ranks: int, chunks: int) -> list[int]:
    """Stage after stage, round and round."""
    return list(range(ranks)) * chunks


def v(ranks: int, chunks: int) -> list[int]:
    """There and back again."""
    ways = [list(range(ranks)), list(range(ranks))[::-1]]
    return [rank for chunk in range(chunks) for rank in ways[chunk % 2]]


@dataclass(frozen=True)
class Rules:
    """How a rank chooses.

    Attributes:
        hint: bf, fb, b-priority or f-priority; bfw for bf with the backward split.
        deep: Whether forwards of the higher stage come first.
        limit: Of every rank; None for none.
        ordered: Whether gradients are accumulated in microbatch order.
    """

    hint: str
    deep: bool
    limit: int | None
    ordered: bool

    @property
    def split(self) -> bool:
        return self.hint == "bfw"


@dataclass(slots=True)
class _Rank:
    stages: list[int]
    ready: set[Task] = field(default_factory=set)
    undecided: set[Task] = field(default_factory=set)
    started: list[Task] = field(default_factory=list)
    in_flight: int = 0
    peak: int = 0
    busy: bool = False


def chunk_simulation(tables: Tables, placement: Sequence[int], rules: Rules) -> Outcome:
    """Run one step; tables are `[stage][microbatch]`, orders and peaks of the result by rank."""
    return _Simulation(tables, placement, rules).run()


class _Simulation:
    def __init__(self, tables: Tables, placement: Sequence[int], rules: Rules) -> None:
        self.tables = tables
        self.rules = rules
        self.rank_of = list(placement)
        self.last = len(placement) - 1
        self.microbatches = range(len(tables["forward_s"][0]))
        ranks = range(max(placement) + 1)
        self.ranks = [_Rank([s for s, rank in enumerate(placement) if rank == r]) for r in ranks]
        self.chunks = len(self.ranks[0].stages)
        self.done: set[Task] = set()
        self.arrived: set[Task] = set()  # an activation as (stage, F, j), a gradient as (s, B, j)
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.pushed = 0
        self.now = 0.0
        self.last_arrival: dict[tuple[int, int], float] = defaultdict(float)
        self.starts: dict[str, float] = {}

    def run(self) -> Outcome:
        for rank in self.ranks:
            rank.undecided = {(s, "F", j) for s in rank.stages for j in self.microbatches}
        for j in self.microbatches:
            self.arrive((0, "F", j))
            self.arrived.add((self.last, "B", j))
        self.choose_all()
        while self.heap:
            until = self.heap[0][0] + INSTANT_S
            while self.heap and self.heap[0][0] <= until:
                self.now, _, apply = heapq.heappop(self.heap)
                apply()
            self.choose_all()
        kinds = 3 if self.rules.split else 2
        every = kinds * len(self.rank_of) * len(self.microbatches)
        assert len(self.done) == every, f"deadlock: {every - len(self.done)} tasks are left"
        orders = [[f"{s}{kind}{j}" for s, kind, j in rank.started] for rank in self.ranks]
        return Outcome(self.now, orders, [rank.peak for rank in self.ranks], self.starts)

    def at(self, time: float, apply: Callable[[], None]) -> None:
        self.pushed += 1
        heapq.heappush(self.heap, (time, self.pushed, apply))

    # -- what happens --------------------------------------------------------------------------

    def arrive(self, what: Task) -> None:
        self.arrived.add(what)
        self.look(what[0], what[2])

    def end(self, task: Task) -> None:
        s, kind, j = task
        rank = self.ranks[self.rank_of[s]]
        rank.busy = False
        self.done.add(task)
        if kind in "BW":
            rank.in_flight -= 1
        if kind == "F" and s < self.last:
            self.send(s, s + 1, (s + 1, "F", j), "activation_delay_s")
        if kind in "BI" and s > 0:
            self.send(s, s - 1, (s - 1, "B", j), "gradient_delay_s")
        for microbatch in (j, j + 1):
            self.look(s, microbatch)

    def send(self, source: int, target: int, what: Task, delays: str) -> None:
        link = (self.rank_of[source], self.rank_of[target])
        if link[0] == link[1]:
            self.arrive(what)
            return
        arrival = max(self.now + self.tables[delays][source][what[2]], self.last_arrival[link])
        self.last_arrival[link] = arrival
        self.at(arrival, lambda: self.arrive(what))

    def look(self, s: int, j: int) -> None:
        """Which of the stage's tasks of that microbatch have become ready?"""
        rank = self.ranks[self.rank_of[s]]
        for kind in "FIW" if self.rules.split else "FB":
            task = (s, kind, j)
            if j in self.microbatches and self.is_ready(task) and task not in rank.started:
                rank.ready.add(task)

    def is_ready(self, task: Task) -> bool:
        s, kind, j = task
        in_turn = not self.rules.ordered or j == 0 or (s, kind, j - 1) in self.done
        if kind == "F":
            return task in self.arrived
        if kind == "W":
            return in_turn and (s, "I", j) in self.done
        has_all = (s, "F", j) in self.done and (s, "B", j) in self.arrived
        return has_all and (kind == "I" or in_turn)

    # -- what is chosen ------------------------------------------------------------------------

    def choose_all(self) -> None:
        for rank in self.ranks:
            task = None if rank.busy else self.choice(rank)
            if task is not None:
                self.start(rank, task)

    def choice(self, rank: _Rank) -> Task | None:
        allowed = [task for task in rank.ready if self.is_admissible(rank, task)]
        last = rank.started[-1][1] if rank.started else "W"
        turn = {
            "bf": "F" if last in "BI" else "B",
            "bfw": "F" if last in "BI" else "B",
            "fb": "B" if last == "F" else "F",
            "b-priority": "B",
            "f-priority": "F",
        }[self.rules.hint]
        return min(allowed, key=lambda task: self.key(task, turn), default=None)

    def key(self, task: Task, turn: str) -> tuple[bool, bool, int, int]:
        """W last, then the direction whose turn it is; forwards from below unless deep."""
        s, kind, j = task
        from_below = kind == "F" and not self.rules.deep
        return kind == "W", (kind == "F") is not (turn == "F"), s if from_below else -s, j

    def is_admissible(self, rank: _Rank, task: Task) -> bool:
        if task[1] != "F" or self.rules.limit is None:
            return True
        bound = self.rules.limit + (self.chunks if self.chunks > 1 else 0)
        if rank.in_flight < bound - self.chunks:
            return True
        oldest = min(j for _, _, j in rank.undecided)
        return rank.in_flight < bound and task[2] == oldest

    def start(self, rank: _Rank, task: Task) -> None:
        s, kind, j = task
        rank.busy = True
        rank.ready.discard(task)
        rank.undecided.discard(task)
        rank.started.append(task)
        rank.in_flight += kind == "F"
        rank.peak = max(rank.peak, rank.in_flight)
        self.starts[f"{s}{kind}{j}"] = self.now
        names = {
            "F": ["forward_s"],
            "B": ["backward_input_s", "weight_s"],
            "I": ["backward_input_s"],
            "W": ["weight_s"],
        }[kind]
        cost = sum(self.tables[name][s][j] for name in names)
        self.at(self.now + cost, lambda: self.end(task))

"""One training step of a chain, simulated from the rules alone: what `simulate` must agree with.

A heap of events and a table of flags; no loop, no Dispatcher, nothing of rrfp_async. The rules are
those of docs/design.md 4 to 6 for one model chunk a rank: a delay is latency and applied once per
tensor, links are FIFO, all events of one instant apply before any choice, a stage runs one task at
a time. It does not know how costs are drawn or which order of a schedule's lists would be good.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

INSTANT_S = 1e-11

Task = tuple[str, int]
Tables = dict[str, list[list[float]]]


@dataclass(slots=True)
class Outcome:
    """What happened.

    Attributes:
        makespan_s: When the last task completed.
        orders: For each stage its tasks in the order they started, as words such as `2F5`.
        peaks: For each stage the largest D, the forwards started whose backward is not completed.
        starts_s: When each task started.
    """

    makespan_s: float
    orders: list[list[str]]
    peaks: list[int]
    starts_s: dict[str, float]


@dataclass(slots=True)
class _Stage:
    inputs: set[int] = field(default_factory=set)
    gradients: set[int] = field(default_factory=set)
    done: set[Task] = field(default_factory=set)
    started: list[Task] = field(default_factory=list)
    busy: bool = False
    peak: int = 0

    @property
    def in_flight(self) -> int:
        forwards = sum(kind == "F" for kind, _ in self.started)
        return forwards - sum(kind == "B" for kind, _ in self.done)


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Task]:
    """The 1F1B list of a stage: as many forwards as there are stages after it, then in turn."""
    ahead = min(stages - 1 - stage, microbatches)
    tasks: list[Task] = [("F", j) for j in range(ahead)]
    for j in range(microbatches):
        tasks += [("F", j + ahead)] * (j + ahead < microbatches) + [("B", j)]
    return tasks


def gpipe(microbatches: int) -> list[Task]:
    """The GPipe list of any stage: all forwards, then all backwards."""
    return [(kind, j) for kind in "FB" for j in range(microbatches)]


def event_simulation(
    tables: Tables,
    hint: str | Sequence[Sequence[Task]],
    *,
    limit: int | None,
    ordered: bool,
    binding: bool = False,
) -> Outcome:
    """Run one step.

    Args:
        tables: `forward_s`, `backward_input_s`, `weight_s`, `activation_delay_s` and
            `gradient_delay_s`, each `[stage][microbatch]`, delays those of what leaves the stage.
        hint: A name, or a list of tasks for each stage.
        limit: Of every stage; None for none.
        ordered: Whether the backwards of a stage run in microbatch order.
        binding: Whether the lists are executed as they stand; then the limit plays no part.
    """
    return _Simulation(tables, hint, limit, ordered=ordered, binding=binding).run()


class _Simulation:
    def __init__(
        self,
        tables: Tables,
        hint: str | Sequence[Sequence[Task]],
        limit: int | None,
        *,
        ordered: bool,
        binding: bool,
    ) -> None:
        self.tables = tables
        self.count = len(tables["forward_s"])
        self.microbatches = len(tables["forward_s"][0])
        if hint == "1f1b":
            hint = [one_f_one_b(s, self.count, self.microbatches) for s in range(self.count)]
        elif hint == "gpipe":
            hint = [gpipe(self.microbatches)] * self.count
        self.hint = hint
        self.limit = limit
        self.ordered = ordered
        self.binding = binding
        self.stages = [_Stage() for _ in range(self.count)]
        self.stages[0].inputs = set(range(self.microbatches))
        self.stages[-1].gradients = set(range(self.microbatches))
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.pushed = 0
        self.now = 0.0
        self.last_arrival: dict[tuple[int, int], float] = defaultdict(float)
        self.starts: dict[str, float] = {}

    def run(self) -> Outcome:
        self.choose_all()
        while self.heap:
            until = self.heap[0][0] + INSTANT_S
            while self.heap and self.heap[0][0] <= until:
                self.now, _, apply = heapq.heappop(self.heap)
                apply()
            self.choose_all()
        missing = [s for s, st in enumerate(self.stages) if len(st.done) < 2 * self.microbatches]
        assert not missing, f"deadlock: the stages {missing} are not done"
        orders = [[f"{s}{k}{j}" for k, j in st.started] for s, st in enumerate(self.stages)]
        return Outcome(self.now, orders, [stage.peak for stage in self.stages], self.starts)

    def at(self, time: float, apply: Callable[[], None]) -> None:
        self.pushed += 1
        heapq.heappush(self.heap, (time, self.pushed, apply))

    def choose_all(self) -> None:
        for s, stage in enumerate(self.stages):
            task = None if stage.busy else self.choice(s)
            if task is not None:
                self.start(s, task)

    def start(self, s: int, task: Task) -> None:
        kind, j = task
        stage = self.stages[s]
        stage.busy = True
        stage.started.append(task)
        stage.peak = max(stage.peak, stage.in_flight)
        self.starts[f"{s}{kind}{j}"] = self.now
        names = ("forward_s",) if kind == "F" else ("backward_input_s", "weight_s")
        self.at(self.now + sum(self.tables[name][s][j] for name in names), self.end_of(s, task))

    def end_of(self, s: int, task: Task) -> Callable[[], None]:
        def end() -> None:
            kind, j = task
            self.stages[s].busy = False
            self.stages[s].done.add(task)
            if kind == "F" and s + 1 < self.count:
                self.send(s, s + 1, self.stages[s + 1].inputs, j, "activation_delay_s")
            elif kind == "B" and s > 0:
                self.send(s, s - 1, self.stages[s - 1].gradients, j, "gradient_delay_s")

        return end

    def send(self, source: int, target: int, into: set[int], j: int, delays: str) -> None:
        link = (source, target)
        arrival = max(self.now + self.tables[delays][source][j], self.last_arrival[link])
        self.last_arrival[link] = arrival
        self.at(arrival, lambda: into.add(j))

    def ready(self, s: int) -> list[Task]:
        stage = self.stages[s]
        done = {j for kind, j in stage.done if kind == "B"}
        forwards = [("F", j) for j in stage.inputs if ("F", j) not in stage.started]
        backwards = [
            ("B", j)
            for j in stage.gradients
            if ("F", j) in stage.done
            and ("B", j) not in stage.started
            and (not self.ordered or done.issuperset(range(j)))
        ]
        return forwards + backwards

    def admissible(self, s: int, task: Task) -> bool:
        stage = self.stages[s]
        if task[0] == "B" or self.limit is None or stage.in_flight < self.limit - 1:
            return True
        oldest = min(j for j in range(self.microbatches) if ("F", j) not in stage.started)
        return stage.in_flight < self.limit and task[1] == oldest

    def choice(self, s: int) -> Task | None:
        ready = self.ready(s)
        started = self.stages[s].started
        if self.binding:
            head = self.hint[s][len(started)] if len(started) < 2 * self.microbatches else None
            return head if head in ready else None
        allowed = [task for task in ready if self.admissible(s, task)]
        if not isinstance(self.hint, str):
            return min(allowed, key=self.hint[s].index, default=None)
        turn = {
            "bf": "F" if started and started[-1][0] == "B" else "B",
            "fb": "B" if started and started[-1][0] == "F" else "F",
            "b-priority": "B",
            "f-priority": "F",
        }[self.hint]
        return min(allowed, key=lambda task: (task[0] != turn, task[1]), default=None)

"""What may happen next in a step, worked out from the edges and the events alone.

The judge of the model. It uses none of the core's ReadySet, Backpressure, orders or Arbiter, and
looks at edges as pairs of stages.
"""

from collections import defaultdict
from itertools import product

from rrfp_async.ids import TaskId, TaskKind
from tests.core.case import Case, Step

Arrival = tuple[TaskKind, int, int, int]
"""Direction (F: an activation, B: a gradient), the edge's source and target, microbatch."""


class Ledger:
    """The facts of one step of a case.

    Attributes:
        started: Tasks in the order they were dispatched, over all ranks.
        done: Tasks that have completed.
        in_flight: D of each rank: forwards started whose backward has not completed.
        peak: The largest D of each rank.
        open_sends: Activations of each rank that no receiver has taken.
        ready_on: The tasks of each rank that could start now, but for backpressure.
    """

    def __init__(self, case: Case, step: Step) -> None:
        self._case = case
        self._step = step
        ranks = range(len(case.limits))
        self.sources: defaultdict[int, list[int]] = defaultdict(list)
        self.targets: defaultdict[int, list[int]] = defaultdict(list)
        for source, target in case.edges:
            self.targets[source].append(target)
            self.sources[target].append(source)
        self.tasks = {
            TaskId(rank, kind, microbatch)
            for rank, microbatch in product(ranks, range(step.microbatches))
            for kind in self._kinds(rank)
        }
        self.started: dict[TaskId, None] = {}
        self.done: set[TaskId] = set()
        self._arrived: set[Arrival] = set()
        self.in_flight = [0 for _ in ranks]
        self.peak = [0 for _ in ranks]
        self.open_sends = [0 for _ in ranks]
        self._unstarted_forwards = [set(range(step.microbatches)) for _ in ranks]
        self.ready_on: list[set[TaskId]] = [
            {task for task in self.tasks if task.stage == rank and self.is_ready(task)}
            for rank in ranks
        ]

    def is_ready(self, task: TaskId) -> bool:
        """Whether `task` belongs to the step, has not started and has all it depends on."""
        if task not in self.tasks or task in self.started:
            return False
        stage, microbatch = task.stage, task.microbatch
        if task.kind is TaskKind.F:
            return all(
                (TaskKind.F, source, stage, microbatch) in self._arrived
                for source in self.sources[stage]
            )
        in_turn = (
            task.kind is TaskKind.I
            or not self._case.deterministic
            or microbatch == 0
            or TaskId(stage, task.kind, microbatch - 1) in self.done
        )
        if task.kind is TaskKind.W:
            return in_turn and TaskId(stage, TaskKind.I, microbatch) in self.done
        return (
            in_turn
            and TaskId(stage, TaskKind.F, microbatch) in self.done
            and all(
                (TaskKind.B, stage, target, microbatch) in self._arrived
                for target in self.targets[stage]
            )
        )

    def backward_of(self, stage: int) -> TaskKind:
        """The kind that sends a gradient back: B, or I of a stage that splits."""
        return TaskKind.I if stage in self._case.split else TaskKind.B

    def _kinds(self, stage: int) -> tuple[TaskKind, ...]:
        if not self._step.backward:
            return (TaskKind.F,)
        split = stage in self._case.split
        return (TaskKind.F, TaskKind.I, TaskKind.W) if split else (TaskKind.F, TaskKind.B)

    def is_admissible(self, task: TaskId) -> bool:
        """DESIGN 6 for one chunk: the last place belongs to the lowest unstarted forward."""
        rank, limit = task.stage, self._case.limits[task.stage]
        if task.kind is not TaskKind.F:
            return True
        if not self._step.backward:
            return self.open_sends[rank] < limit
        if self.in_flight[rank] < limit - 1:
            return True
        oldest = min(self._unstarted_forwards[rank])
        return self.in_flight[rank] < limit and task.microbatch == oldest

    def start(self, task: TaskId) -> None:
        """`task` was dispatched: once, with all it depends on, and within the limit."""
        rank = task.stage
        assert self.is_ready(task), f"{task} started, but ran before or is not ready"
        assert self.is_admissible(task), f"{task} started against the limit"
        self.started[task] = None
        self.ready_on[rank].discard(task)
        if task.kind is TaskKind.F:
            self._unstarted_forwards[rank].remove(task.microbatch)
            if self._step.backward:
                self.in_flight[rank] += 1
                self.peak[rank] = max(self.peak[rank], self.in_flight[rank])
        limit = self._case.limits[rank]
        assert self.in_flight[rank] <= limit, f"rank {rank}: D={self.in_flight[rank]} > {limit}"

    def finish(self, task: TaskId) -> set[TaskId]:
        """`task` has run; returns the tasks of its rank that this made ready."""
        assert task in self.started, f"{task} completed without a start"
        assert task not in self.done, f"{task} completed twice"
        self.done.add(task)
        stage, microbatch = task.stage, task.microbatch
        if task.kind is TaskKind.F:
            return self._now_ready(TaskId(stage, self.backward_of(stage), microbatch))
        if task.kind is TaskKind.I:
            return self._now_ready(TaskId(stage, TaskKind.W, microbatch))
        self.in_flight[stage] -= 1
        if not self._case.deterministic:
            return set()
        return self._now_ready(TaskId(stage, task.kind, microbatch + 1))

    def arrive(self, kind: TaskKind, source: int, target: int, microbatch: int) -> set[TaskId]:
        """Something came along (F) or against (B) an edge; returns as `finish`."""
        self._arrived.add((kind, source, target, microbatch))
        stage = target if kind is TaskKind.F else source
        task_kind = TaskKind.F if kind is TaskKind.F else self.backward_of(stage)
        return self._now_ready(TaskId(stage, task_kind, microbatch))

    def check_complete(self) -> None:
        """At the step's end every task has run, in order where that was asked for."""
        left = sorted(map(str, self.tasks - self.done))
        assert not left, f"deadlock: {len(left)} tasks left, such as {left[:8]}"
        assert self.started.keys() == self.done == self.tasks
        assert not any(self.in_flight)
        assert not any(self.open_sends)
        if self._case.deterministic:
            for rank in range(len(self._case.limits)):
                order = self.accumulated_on(rank)
                assert order == sorted(order), f"rank {rank} accumulated in the order {order}"

    def accumulated_on(self, rank: int) -> list[int]:
        """The microbatches of a rank in the order their gradients were accumulated."""
        kinds = (TaskKind.B, TaskKind.W)
        return [t.microbatch for t in self.started if t.stage == rank and t.kind in kinds]

    def _now_ready(self, task: TaskId) -> set[TaskId]:
        if not self.is_ready(task):
            return set()
        self.ready_on[task.stage].add(task)
        return {task}

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
        stages = range(len(ranks) * case.chunks)
        self.rank_of = [_rank_of(stage, case) for stage in stages]
        self.sources: defaultdict[int, list[int]] = defaultdict(list)
        self.targets: defaultdict[int, list[int]] = defaultdict(list)
        for source, target in case.edges:
            self.targets[source].append(target)
            self.sources[target].append(source)
        self.tasks = {
            TaskId(stage, kind, microbatch)
            for stage, microbatch in product(stages, range(step.microbatches))
            for kind in self._kinds(stage)
        }
        self.started: dict[TaskId, None] = {}
        self.done: set[TaskId] = set()
        self._arrived: set[Arrival] = set()
        self.in_flight = [0 for _ in ranks]
        self.peak = [0 for _ in ranks]
        self.open_sends = [0 for _ in ranks]
        forwards = {task for task in self.tasks if task.kind is TaskKind.F}
        self._unstarted_forwards = [
            {task for task in forwards if self.rank_of[task.stage] == rank} for rank in ranks
        ]
        self.ready_on: list[set[TaskId]] = [set() for _ in ranks]
        for task in filter(self.is_ready, self.tasks):
            self.ready_on[self.rank_of[task.stage]].add(task)

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
        """DESIGN 6: the last C places belong to the lowest microbatch with an unstarted forward."""
        rank = self.rank_of[task.stage]
        bound = self.bound_of(rank)
        if task.kind is not TaskKind.F:
            return True
        if not self._step.backward:
            return self.open_sends[rank] < bound
        if self.in_flight[rank] < bound - self._case.chunks:
            return True
        oldest = min(forward.microbatch for forward in self._unstarted_forwards[rank])
        return self.in_flight[rank] < bound and task.microbatch == oldest

    def bound_of(self, rank: int) -> int:
        """What D never passes: the limit, with several chunks one more for each."""
        chunks = self._case.chunks
        return self._case.limits[rank] + (chunks if chunks > 1 else 0)

    def start(self, task: TaskId) -> None:
        """`task` was dispatched: once, with all it depends on, and within the limit."""
        rank = self.rank_of[task.stage]
        assert self.is_ready(task), f"{task} started, but ran before or is not ready"
        assert self.is_admissible(task), f"{task} started against the limit"
        self.started[task] = None
        self.ready_on[rank].discard(task)
        if task.kind is TaskKind.F:
            self._unstarted_forwards[rank].remove(task)
            if self._step.backward:
                self.in_flight[rank] += 1
                self.peak[rank] = max(self.peak[rank], self.in_flight[rank])
        bound = self.bound_of(rank)
        assert self.in_flight[rank] <= bound, f"rank {rank}: D={self.in_flight[rank]} > {bound}"

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
        self.in_flight[self.rank_of[stage]] -= 1
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
            for stage in range(len(self.rank_of)):
                order = self.accumulated_on(stage)
                assert order == sorted(order), f"stage {stage} accumulated in the order {order}"

    def accumulated_on(self, stage: int) -> list[int]:
        """The microbatches of a stage in the order their gradients were accumulated."""
        kinds = (TaskKind.B, TaskKind.W)
        return [t.microbatch for t in self.started if t.stage == stage and t.kind in kinds]

    def _now_ready(self, task: TaskId) -> set[TaskId]:
        if not self.is_ready(task):
            return set()
        self.ready_on[self.rank_of[task.stage]].add(task)
        return {task}


def _rank_of(stage: int, case: Case) -> int:
    """Where `stage` lives, by the words of the issue: round and round, or there and back."""
    if isinstance(case.placement, tuple):
        return case.placement[stage]
    ranks = len(case.limits)
    chunk, place = divmod(stage, ranks)
    return ranks - 1 - place if case.placement == "v" and chunk % 2 else place

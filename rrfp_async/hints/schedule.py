"""Schedules: the order of every rank's tasks as lists, published, read from a file, or recorded.

As a hint, a rank's list ranks its ready tasks. With `binding=True` the rank executes it as it
stands, which is what the systems that RRFP (arXiv 2605.18750) is compared with do. A schedule
knows tasks by name; it does not know what is ready.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rrfp_async.hints.base import Admissible, HintOrder
from rrfp_async.hints.checks import Plan, Rules, as_split, check_accumulation, checked_plan, peak_of
from rrfp_async.hints.ranked import RankedQueue, take
from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.topology import Topology


class Schedule(ABC):
    """The order of every rank's tasks. Immutable; the ranks of one process share it.

    Attributes:
        binds: Whether it is executed as it stands where `binding` is not given.
        splits: Whether it splits backwards into I and W.
        complete: Whether a list must hold every task of its rank; otherwise those it lacks rank
            last, unless it is executed as it stands.
    """

    binds = False
    complete = True
    splits = False

    def __init__(self) -> None:
        self._topology: Topology | None = None
        self._plans: dict[object, Plan] = {}

    @property
    @abstractmethod
    def name(self) -> str:
        """What ranks compare to be sure they use the same schedule."""

    @abstractmethod
    def orders(
        self, topology: Topology, microbatches: int, step: int
    ) -> Sequence[Sequence[TaskId]]:
        """The tasks of a training step in order, rank by rank.

        Args:
            topology: The pipeline.
            microbatches: Of the step.
            step: What `step_for` says of the step's number.
        """

    def forwards(
        self, topology: Topology, microbatches: int, step: int
    ) -> Sequence[Sequence[TaskId]]:
        """The tasks of an evaluation in order, as `orders`; what is no forward is left out."""
        return self.orders(topology, microbatches, step)

    def row(self, rank: int) -> str:
        """Where the list of `rank` stands, in words."""
        return f"{self.name}, rank {rank}"

    def known_steps(self, microbatches: int) -> Iterable[tuple[int, int, bool]]:
        """The steps to check before the first: number, microbatches, whether it trains."""
        return [(0, microbatches, True)]

    def plan(self, topology: Topology, microbatches: int, step: int, rules: Rules) -> Plan:
        """The checked lists of a step.

        Raises:
            ValueError: If a list breaks a rule; the first fault names row, task and rule.
        """
        if self._topology is not topology:
            self._topology, self._plans = topology, {}
        step = self.step_for(step, training=rules.training)
        key = (microbatches, step, rules)
        if key not in self._plans:
            self._plans.clear()  # lists can be long, and steps mostly go on as they began
            ordered = self.orders if rules.training else self.forwards
            orders = ordered(topology, microbatches, step)
            self._plans[key] = checked_plan(orders, topology, microbatches, rules, self.row)
        return self._plans[key]

    def step_for(self, step: int, *, training: bool) -> int:  # noqa: ARG002 - a default
        """The step whose lists `step` takes; 0 where all have the same."""
        return 0


@dataclass(frozen=True, slots=True)
class Execution:
    """How a rank uses a schedule: as it stands or as a ranking, accumulating in order or not."""

    binding: bool
    deterministic: bool

    def rules(self, schedule: Schedule, *, training: bool) -> Rules:
        """What a schedule's lists must fulfil then."""
        return Rules(
            training=training,
            binding=self.binding,
            complete=schedule.complete or self.binding,
            deterministic=self.deterministic,
        )


class ListedOrder(HintOrder):
    """One rank's list of a schedule as its hint order."""

    def __init__(
        self, schedule: Schedule, topology: Topology, rank: int, execution: Execution
    ) -> None:
        self.splits = schedule.splits
        self._schedule = schedule
        self._topology = topology
        self._rank = rank
        self._execution = execution
        self._step = 0
        self._peak = 0
        self._queue = RankedQueue(())

    @property
    def name(self) -> str:
        """The schedule's."""
        return self._schedule.name

    @property
    def fixed_peak(self) -> int | None:
        """The list's own peak, if it is executed as it stands."""
        return self._peak if self._execution.binding else None

    def begin_step(self, tasks: Sequence[TaskId]) -> None:
        """Rank the step's tasks as listed; those that the list lacks come last.

        Raises:
            ValueError: If the schedule does not fit the step.
        """
        microbatches = 1 + max((task.microbatch for task in tasks), default=-1)
        training = any(task.kind is not TaskKind.F for task in tasks)
        rules = self._execution.rules(self._schedule, training=training)
        plan = self._schedule.plan(self._topology, microbatches, self._step, rules)
        split = {task.stage for task in tasks if task.kind is TaskKind.W}
        planned = plan.orders[self._rank]
        listed = as_split(planned, split)  # a stage may be unable to split
        if listed != planned and rules.in_order:
            check_accumulation(listed, self._schedule.row(self._rank))
        if len(listed) < len(tasks):
            known = set(listed)
            listed = (*listed, *(task for task in tasks if task not in known))
        self._queue = RankedQueue(listed)
        self._peak = peak_of(listed)
        self._step += 1

    def add(self, task: TaskId) -> None:
        """Mark `task` ready."""
        self._queue.add(task)

    def peek(self, admissible: Admissible) -> TaskId | None:
        """The first ready and admissible task of the list; executed as it stands, only its head."""
        best = self._queue.peek(admissible)
        if best is not None and self._execution.binding and best != self._queue.head:
            return None
        return best

    def commit(self, task: TaskId) -> None:
        """Take `task` off the list."""
        self._queue.remove(task)

    def drop(self, task: TaskId) -> None:
        """Take `task` off the list: it will not run."""
        self._queue.remove(task)

    def position(self, task: TaskId) -> int | None:
        """The task's place in the list."""
        return self._queue.position(task)

    def ahead_of(self, task: TaskId | None, most: int) -> list[TaskId]:
        """Higher-ranked tasks that are still to come; executed as it stands, the one waited for."""
        return take(self._queue.ahead_of(task), 1 if self._execution.binding else most)

"""What a schedule's lists must fulfil before a step runs by them, and the first fault in words.

Every task at most once and on its own rank; where asked for, none missing; and for lists that are
executed as they stand, no circular wait together with the dependencies, and gradients in
microbatch order if that is wanted. Costs are linear in the tasks.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.topology import Topology

Row = Callable[[int], str]
"""Names where the list of a rank stands."""

_ACCUMULATING = (TaskKind.B, TaskKind.W)
_TOLD_MOST = 4
_SPLIT = (TaskKind.I, TaskKind.W)


@dataclass(frozen=True, slots=True)
class Rules:
    """What lists must fulfil.

    Attributes:
        training: Whether the step has backwards; if not, listed ones are left out.
        binding: Whether the lists are executed as they stand.
        complete: Whether every task must be listed.
        deterministic: Whether gradients are accumulated in microbatch order.
    """

    training: bool
    binding: bool
    complete: bool
    deterministic: bool

    @property
    def in_order(self) -> bool:
        """Whether backwards must be listed in microbatch order."""
        return self.binding and self.deterministic

    def kinds(self, *, split: bool) -> tuple[TaskKind, ...]:
        """The kinds of a stage's tasks, whose backward is split or not."""
        if not self.training:
            return (TaskKind.F,)
        return (TaskKind.F, *_SPLIT) if split else (TaskKind.F, TaskKind.B)


@dataclass(frozen=True, slots=True)
class Plan:
    """The checked lists of a step, rank by rank, and each one's own peak of forwards in flight."""

    orders: tuple[tuple[TaskId, ...], ...]
    peaks: tuple[int, ...]


def checked_plan(
    orders: Sequence[Sequence[TaskId]],
    topology: Topology,
    microbatches: int,
    rules: Rules,
    row: Row,
) -> Plan:
    """The lists of a step, checked.

    Raises:
        ValueError: If they break a rule; names the row, the task and the rule.
    """
    if len(orders) != topology.pp:
        raise ValueError(
            f"{row(len(orders) - 1)} is the last of {len(orders)} lists for {topology.pp} "
            f"ranks: give one row for each rank"
        )
    split = split_stages(orders) if rules.training else frozenset()
    wanted = tuple(
        as_split(order, split) if rules.training else _forwards(order) for order in orders
    )
    checks = _RowChecks(topology, microbatches, rules, row, split)
    for rank, order in enumerate(wanted):
        checks.check(rank, order)
    if rules.binding:
        _check_feasible(_Execution(wanted, topology, split), row)
    return Plan(wanted, tuple(map(peak_of, wanted)))


def split_stages(orders: Iterable[Iterable[TaskId]]) -> frozenset[int]:
    """The stages whose backward is listed as I and W."""
    return frozenset(task.stage for order in orders for task in order if task.kind in _SPLIT)


def as_split(order: Iterable[TaskId], split: Collection[int]) -> tuple[TaskId, ...]:
    """`order` with the backwards of the stages in `split` as I and W, of others as B.

    A B stands for I and W after it; without a split, B stands where I is listed.
    """
    tasks = []
    for task in order:
        if task.kind is TaskKind.F or (task.kind in _SPLIT) == (task.stage in split):
            tasks.append(task)
        elif task.stage in split:
            tasks += [TaskId(task.stage, kind, task.microbatch) for kind in _SPLIT]
        elif task.kind is TaskKind.I:
            tasks.append(TaskId(task.stage, TaskKind.B, task.microbatch))
    return tuple(tasks)


def _forwards(order: Iterable[TaskId]) -> tuple[TaskId, ...]:
    return tuple(task for task in order if task.kind is TaskKind.F)


def peak_of(order: Iterable[TaskId]) -> int:
    """The most forwards in flight when `order` is executed as it stands."""
    in_flight = peak = 0
    for task in order:
        if task.kind is TaskKind.F:
            in_flight += 1
            peak = max(peak, in_flight)
        elif task.kind in _ACCUMULATING:
            in_flight -= 1
    return peak


@dataclass(frozen=True, slots=True)
class _RowChecks:
    """What one list can be asked without looking at the others."""

    topology: Topology
    microbatches: int
    rules: Rules
    row: Row
    split: frozenset[int]

    def check(self, rank: int, order: Sequence[TaskId]) -> None:
        """Raise for the first fault of the list of `rank`."""
        seen: set[TaskId] = set()
        for place, task in enumerate(order):
            fault = self._fault_of(task, rank, seen)
            if fault is not None:
                raise ValueError(f"{self.row(rank)}, entry {place}: task {task}, but {fault}")
            seen.add(task)
        if self.rules.complete:
            self._check_complete(rank, seen)
        if self.rules.in_order:
            check_accumulation(order, self.row(rank))

    def _fault_of(self, task: TaskId, rank: int, seen: set[TaskId]) -> str | None:
        if task.stage not in self.topology.stages_of(rank):
            owned = list(self.topology.stages_of(rank))
            return f"rank {rank} owns the stages {owned}: list a task on its own rank"
        if not 0 <= task.microbatch < self.microbatches:
            last = self.microbatches - 1
            return f"the step has the microbatches 0 to {last}: list only those"
        kinds = self._kinds(task.stage)
        if task.kind not in kinds:
            letters = ", ".join(kind.value for kind in kinds)
            return f"the stage has tasks of the kinds {letters}: list only those"
        if task in seen:
            return "it stands there a second time: list every task once"
        return None

    def _kinds(self, stage: int) -> tuple[TaskKind, ...]:
        return self.rules.kinds(split=stage in self.split)

    def _check_complete(self, rank: int, seen: set[TaskId]) -> None:
        for stage in self.topology.stages_of(rank):
            for microbatch in range(self.microbatches):
                for kind in self._kinds(stage):
                    task = TaskId(stage, kind, microbatch)
                    if task not in seen:
                        raise ValueError(
                            f"{self.row(rank)}: task {task} is missing: list every task once"
                        )


def check_accumulation(order: Iterable[TaskId], row: str) -> None:
    """Refuse a list, executed as it stands, whose gradients come out of microbatch order.

    Raises:
        ValueError: Names the first pair.
    """
    last: dict[int, TaskId] = {}
    for task in order:
        if task.kind not in _ACCUMULATING:
            continue
        before = last.get(task.stage)
        if before is not None and before.microbatch > task.microbatch:
            raise ValueError(
                f"{row}: {before} stands before {task}, but gradients are accumulated in "
                f"microbatch order: list them in that order, or set deterministic=False"
            )
        last[task.stage] = task


class _Execution:
    """Lists executed without time: who is where, and what waits for what."""

    def __init__(
        self, orders: Sequence[Sequence[TaskId]], topology: Topology, split: frozenset[int]
    ) -> None:
        self.orders = orders
        self._split = split
        self.place = [0] * len(orders)
        self._topology = topology
        self._done: set[TaskId] = set()
        self._rows = {
            stage: rank for rank in range(len(orders)) for stage in topology.stages_of(rank)
        }

    def run(self) -> bool:
        """Execute as far as it goes; returns whether that is to the end."""
        ranks = deque(range(len(self.orders)))
        while ranks:
            rank = ranks.popleft()
            order = self.orders[rank]
            while self.place[rank] < len(order):
                task = order[self.place[rank]]
                if self.waits_for(task) is not None:
                    break
                self._done.add(task)
                self.place[rank] += 1
                ranks.extend(self._served_by(task))
        return all(at == len(order) for at, order in zip(self.place, self.orders, strict=True))

    def waits_for(self, task: TaskId) -> TaskId | None:
        """A task that `task` depends on and that has not run."""
        return next((need for need in self._needs(task) if need not in self._done), None)

    def head(self, rank: int) -> TaskId | None:
        """The task at which `rank` stands."""
        order, place = self.orders[rank], self.place[rank]
        return order[place] if place < len(order) else None

    def row_of(self, task: TaskId) -> int:
        """The rank that runs `task`."""
        return self._rows[task.stage]

    def _needs(self, task: TaskId) -> Iterator[TaskId]:
        stage, microbatch = task.stage, task.microbatch
        if task.kind is TaskKind.F:
            for edge in self._topology.in_edges(stage):
                yield TaskId(edge.source, TaskKind.F, microbatch)
            return
        if task.kind is TaskKind.W:
            yield TaskId(stage, TaskKind.I, microbatch)
            return
        yield TaskId(stage, TaskKind.F, microbatch)
        for edge in self._topology.out_edges(stage):
            kind = TaskKind.I if edge.target in self._split else TaskKind.B
            yield TaskId(edge.target, kind, microbatch)

    def _served_by(self, task: TaskId) -> Iterator[int]:
        if task.kind is TaskKind.F:
            return (self._rows[edge.target] for edge in self._topology.out_edges(task.stage))
        return (self._rows[edge.source] for edge in self._topology.in_edges(task.stage))


def _check_feasible(execution: _Execution, row: Row) -> None:
    if execution.run():
        return
    orders = execution.orders
    rank = next(rank for rank in range(len(orders)) if execution.head(rank) is not None)
    waits: dict[int, str] = {}
    while rank not in waits:
        head = execution.head(rank)
        need = None if head is None else execution.waits_for(head)
        if head is None or need is None:
            break
        waits[rank] = f"{row(rank)}, entry {execution.place[rank]}: {head} waits for {need}"
        if execution.row_of(need) == rank:
            waits[rank] += ", which the same row lists after it"
        rank = execution.row_of(need)
    circle = list(waits.values())[list(waits).index(rank) if rank in waits else 0 :]
    told = "; ".join(circle[:_TOLD_MOST]) + ("; ..." if len(circle) > _TOLD_MOST else "")
    raise ValueError(
        f"{told}: executed as they stand, the lists wait for each other for ever; list every task "
        f"after those it depends on"
    )

"""From arrivals and completions to ready tasks: what a rank's tasks still wait for.

Every task has a set of needs, each of which is met exactly once; a task whose last need is met is
ready. What the needs carry (tensors) and which ready task runs next are not known here.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rrfp_async.errors import ProtocolError
from rrfp_async.ids import Edge, TaskId, TaskKind
from rrfp_async.topology import Topology


@dataclass(frozen=True, slots=True)
class Activation:
    """The need for what an edge brings forward for a microbatch."""

    edge: Edge
    microbatch: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """The need for what an edge brings back for a microbatch, be it "no gradient"."""

    edge: Edge
    microbatch: int


Need = Activation | Gradient | TaskId
"""What a task can wait for: an arrival, or a task of the same rank."""


_NOT_REDUCED: Mapping[TaskId, Sequence[int | TaskId]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the tasks of steps of one kind need, and who needs what. Read, never changed."""

    key: tuple[object, ...]
    needs: dict[TaskId, set[Need]]
    waiting: dict[Need, list[TaskId]]


class ReadySet:
    """Tracks the needs of one rank's tasks through one step after another.

    F needs every in-edge's activation. B needs the local F and every out-edge's gradient; where
    the backward is split, I needs those and W needs I. With `deterministic`, B (split: W) of a
    microbatch also needs the stage's B (W) of the one before: gradients are then accumulated in
    microbatch order whatever the dispatch order was, and since this gates readiness, not choice,
    nothing ever waits with a task in hand.
    """

    def __init__(self, topology: Topology, rank: int, *, deterministic: bool) -> None:
        self._topology = topology
        self._stages = topology.stages_of(rank)
        self._deterministic = deterministic
        self._missing: dict[TaskId, set[Need]] = {}
        self._waiting: dict[Need, list[TaskId]] = {}
        self._void: set[TaskId] = set()
        self._plan: _Plan | None = None

    def begin_step(
        self,
        microbatches: int,
        *,
        backward: bool,
        split: Collection[int] = (),
        reduced: Mapping[TaskId, Sequence[int | TaskId]] = _NOT_REDUCED,
    ) -> tuple[TaskId, ...]:
        """Set up a step of `microbatches` forwards, and as many backwards if `backward`.

        Args:
            microbatches: Of the step.
            backward: Whether it trains.
            split: The stages that have two tasks, I and W, for each backward.
            reduced: Reductions at its end, each with what it needs: stages, whose gradients must
                be complete, and other reductions.

        Returns:
            Every task of the step on this rank. The ones with no needs are ready: ask `ready_now`.

        Raises:
            ProtocolError: If tasks of the last step have not completed.
        """
        if self._missing:
            raise ProtocolError(f"a step began while {self.summary()}")
        key = (microbatches, backward, frozenset(split), tuple(reduced.items()))
        if self._plan is None or self._plan.key != key:  # mostly steps are alike
            needs = self._needs(microbatches, backward=backward, split=split)
            for task, stages in reduced.items():
                needs[task] = {last for last in needs if _accumulates(last, stages, split)}
                needs[task] |= {before for before in stages if isinstance(before, TaskId)}
            self._plan = _Plan(key, needs, _inverted(needs))
        self._missing = {task: set(needs) for task, needs in self._plan.needs.items()}
        self._waiting = dict(self._plan.waiting)
        self._void.clear()
        return tuple(self._missing)

    def ready_now(self) -> list[TaskId]:
        """Tasks without a missing need that have not completed."""
        return [task for task, missing in self._missing.items() if not missing]

    def activation_arrived(self, edge: Edge, microbatch: int) -> list[TaskId]:
        """Note what came along `edge`; returns the tasks that this made ready.

        Raises:
            ProtocolError: If it came before, or no task of the step is waiting for it.
        """
        return self._meet(Activation(edge, microbatch))

    def gradient_arrived(self, edge: Edge, microbatch: int) -> list[TaskId]:
        """Note what came back against `edge`; as `activation_arrived`."""
        return self._meet(Gradient(edge, microbatch))

    def completed(self, task: TaskId) -> list[TaskId]:
        """Note that `task` has run; returns the tasks that this made ready.

        Raises:
            ProtocolError: If it was not ready, or completed before.
        """
        missing = self._missing.get(task)
        if missing is None or missing:
            waits = "unknown or completed before" if missing is None else f"waiting for {missing}"
            raise ProtocolError(f"task {task} completed, but it was {waits}")
        del self._missing[task]
        return self._meet(task) if task in self._waiting else []

    def void(self, task: TaskId) -> bool:
        """Note that `task` need not run: once it has all it needs it counts as completed.

        Returns:
            Whether it is so: False if it is none of the step's, or was ready before.
        """
        if not self._missing.get(task):
            return False
        self._void.add(task)
        return True

    def expects_activation(self, edge: Edge, microbatch: int) -> bool:
        """Whether a task of this step still waits for that activation."""
        return Activation(edge, microbatch) in self._waiting

    def expects_gradient(self, edge: Edge, microbatch: int) -> bool:
        """Whether a task of this step still waits for that gradient."""
        return Gradient(edge, microbatch) in self._waiting

    @property
    def remaining(self) -> int:
        """The number of the step's tasks that have not completed."""
        return len(self._missing)

    def missing(self, task: TaskId) -> frozenset[Need]:
        """What `task` still waits for."""
        return frozenset(self._missing.get(task, ()))

    def summary(self, most: int = 8) -> str:
        """A line for people: what is left and what it waits for."""
        left = [
            f"{task} waits for {', '.join(sorted(map(str, missing))) or 'its turn'}"
            for task, missing in list(self._missing.items())[:most]
        ]
        return f"{self.remaining} tasks have not completed: " + "; ".join(left)

    def reset(self) -> None:
        """Forget a step that failed."""
        self._missing.clear()
        self._waiting.clear()
        self._void.clear()

    def _needs(
        self, microbatches: int, *, backward: bool, split: Collection[int]
    ) -> dict[TaskId, set[Need]]:
        """Every task of a step, and what it needs."""
        missing: dict[TaskId, set[Need]] = {}
        for stage in self._stages:
            for microbatch in range(microbatches):
                missing[TaskId(stage, TaskKind.F, microbatch)] = {
                    Activation(edge, microbatch) for edge in self._topology.in_edges(stage)
                }
                if backward:
                    missing.update(
                        self._split_backward(stage, microbatch)
                        if stage in split
                        else self._full_backward(stage, microbatch)
                    )
        return missing

    def _full_backward(self, stage: int, microbatch: int) -> Iterable[tuple[TaskId, set[Need]]]:
        task = TaskId(stage, TaskKind.B, microbatch)
        yield task, self._gradients(stage, microbatch) | self._turn(task)

    def _split_backward(self, stage: int, microbatch: int) -> Iterable[tuple[TaskId, set[Need]]]:
        for_inputs = TaskId(stage, TaskKind.I, microbatch)
        for_weights = TaskId(stage, TaskKind.W, microbatch)
        yield for_inputs, self._gradients(stage, microbatch)
        yield for_weights, {for_inputs} | self._turn(for_weights)

    def _gradients(self, stage: int, microbatch: int) -> set[Need]:
        """What every backward needs: the local forward, and what comes back for it."""
        needs: set[Need] = {Gradient(e, microbatch) for e in self._topology.out_edges(stage)}
        needs.add(TaskId(stage, TaskKind.F, microbatch))
        return needs

    def _turn(self, task: TaskId) -> set[Need]:
        """What `task` needs so that gradients are accumulated in microbatch order."""
        if not self._deterministic or task.microbatch == 0:
            return set()
        return {TaskId(task.stage, task.kind, task.microbatch - 1)}

    def _meet(self, need: Need) -> list[TaskId]:
        if need not in self._waiting:
            raise ProtocolError(f"{need} came twice or belongs to no task of this step")
        ready, met = [], [need]
        for one in met:  # it grows: what need not run meets a need by having all it needs
            for task in self._waiting.pop(one, ()):
                missing = self._missing[task]
                missing.remove(one)
                if not missing and task in self._void:
                    del self._missing[task]
                    met.append(task)
                elif not missing:
                    ready.append(task)
        return ready


def _accumulates(task: TaskId, stages: Collection[int | TaskId], split: Collection[int]) -> bool:
    """Whether `task` adds to the gradients of one of `stages`."""
    kind = TaskKind.W if task.stage in split else TaskKind.B
    return task.kind is kind and task.stage in stages


def _inverted(needs: Mapping[TaskId, set[Need]]) -> dict[Need, list[TaskId]]:
    waiting: defaultdict[Need, list[TaskId]] = defaultdict(list)
    for task, of_task in needs.items():
        for need in of_task:
            waiting[need].append(task)
    return dict(waiting)

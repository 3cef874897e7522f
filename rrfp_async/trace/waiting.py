"""What a rank's best tasks wait for, back to the first thing that is not the rank's own to do.

A backward that waits for its forward, which waits for an activation, waits for that activation.
It does not know whether anything is wrong with waiting.
"""

from collections.abc import Iterable

from rrfp_async.grid import Column
from rrfp_async.hints import Admissible
from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.ready_set import Activation, Gradient, Need, ReadySet
from rrfp_async.trace.records import Lack, Wait

WAITS_MOST = 4
"""How many waits are told at most."""

_LOOKED_AT_MOST = 64

Arrival = Activation | Gradient


class Waiting:
    """The waits of one rank.

    Args:
        ready_set: What its tasks need.
        column: The pipeline it is part of.
        rank: Which it is.
        splits: Whether gradients come from I rather than B.
    """

    def __init__(self, ready_set: ReadySet, column: Column, rank: int, *, splits: bool) -> None:
        self._ready_set = ready_set
        self._column = column
        self._rank = rank
        self._backward = TaskKind.I if splits else TaskKind.B
        self._local = frozenset(filter(column.topology.is_local, column.topology.graph))

    def of(self, tasks: Iterable[TaskId], admissible: Admissible) -> tuple[Wait, ...]:
        """What `tasks`, the best first, wait for; at most `WAITS_MOST`, each once.

        Left out is what would not help: what comes for a task that would not be admissible.
        """
        seen: set[TaskId] = set()
        found: list[Wait] = []
        for task in tasks:
            self._follow(task, admissible, seen, found)
        return tuple(found[:WAITS_MOST])

    def _follow(
        self, task: TaskId, admissible: Admissible, seen: set[TaskId], found: list[Wait]
    ) -> None:
        """Find the end of each chain of this rank's own tasks that `task` hangs on."""
        open_ends: list[tuple[TaskId, TaskId | None]] = [(task, None)]
        while open_ends and len(seen) < _LOOKED_AT_MOST and len(found) < WAITS_MOST:
            task, needed_by = open_ends.pop()
            if task in seen:
                continue
            seen.add(task)
            missing = self._ready_set.missing(task)
            own = [maker for need in missing if (maker := self._own_maker(need))]
            if own:
                open_ends += [(maker, task) for maker in sorted(own, key=_age, reverse=True)]
            elif missing and admissible(task):
                found += [self._from_elsewhere(task, need) for need in sorted(missing, key=_place)]
            elif not missing and needed_by is not None:  # ready, and held back
                found.append(Wait(needed_by, Lack.TASK, None, task, self._rank))

    def _own_maker(self, need: Need) -> TaskId | None:
        """The task of this rank that meets the need, if one does."""
        if isinstance(need, TaskId):
            return need
        return self._maker(need) if need.edge in self._local else None

    def _maker(self, need: Arrival) -> TaskId:
        if isinstance(need, Activation):
            return TaskId(need.edge.source, TaskKind.F, need.microbatch)
        return TaskId(need.edge.target, self._backward, need.microbatch)

    def _from_elsewhere(self, task: TaskId, need: Need) -> Wait:
        assert not isinstance(need, TaskId)  # those are this rank's own
        maker = self._maker(need)
        lack = Lack.ACTIVATION if isinstance(need, Activation) else Lack.GRADIENT
        return Wait(task, lack, need.edge, maker, self._column.rank_of(maker.stage))


def _age(task: TaskId) -> tuple[int, bool, int]:
    """The oldest microbatch first, of that the forward."""
    return (task.microbatch, task.kind is not TaskKind.F, task.stage)


def _place(need: Need) -> tuple[int, int]:
    """Edges as they are numbered."""
    assert not isinstance(need, TaskId)
    return (need.edge.source, need.edge.target)

"""The queue behind the orders against a model that looks at every task each time."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_async.hints import Admissible, RankedQueue, RoundHint
from rrfp_async.ids import TaskId, TaskKind
from tests.core.words import task, tasks, words

STEP = [
    TaskId(stage, kind, microbatch)
    for stage in (1, 5)
    for kind in (TaskKind.F, TaskKind.B)
    for microbatch in range(5)
]
PLACES = st.integers(0, len(STEP) - 1)
ACTIONS = st.lists(st.tuples(st.sampled_from(["add", "best", "other"]), PLACES), max_size=60)
ADMISSIBLE = st.builds(Admissible, st.booleans(), st.none() | st.integers(0, 5))


@dataclass
class NaiveQueue:
    """The same claims in O(n)."""

    ranked: Sequence[TaskId]
    ready: set[TaskId] = field(default_factory=set)
    gone: set[TaskId] = field(default_factory=set)

    def peek(self, admissible: Admissible) -> TaskId | None:
        return next((t for t in self.ranked if t in self.ready and admissible(t)), None)

    def remove(self, task: TaskId) -> None:
        self.ready.discard(task)
        self.gone.add(task)

    def ahead_of(self, task: TaskId | None) -> list[TaskId]:
        end = len(self.ranked) if task is None else self.ranked.index(task)
        return [each for each in self.ranked[:end] if each not in self.gone]


@dataclass
class NaiveRound:
    """BF and FB as their definition reads."""

    forward_turn: bool
    ready: set[TaskId] = field(default_factory=set)

    def peek(self, admissible: Admissible) -> TaskId | None:
        return min(filter(admissible, self.ready), key=self._rank, default=None)

    def commit(self, task: TaskId) -> None:
        self.ready.remove(task)
        self.forward_turn = task.kind is not TaskKind.F

    def _rank(self, task: TaskId) -> tuple[bool, int, int]:
        forward = task.kind is TaskKind.F
        return (
            forward is not self.forward_turn,
            task.stage if forward else -task.stage,
            task.microbatch,
        )


@given(st.randoms(use_true_random=False), ACTIONS, st.lists(ADMISSIBLE, min_size=1, max_size=60))
def test_the_queue_answers_as_one_that_tries_every_task(
    shuffle: random.Random, actions: list[tuple[str, int]], admissibles: list[Admissible]
) -> None:
    """After any adds and removals, of the best task or another, peek and ahead_of are right."""
    ranked = list(STEP)
    shuffle.shuffle(ranked)
    queue, naive = RankedQueue(ranked), NaiveQueue(ranked)
    for step, (action, place) in enumerate(actions):
        admissible = admissibles[step % len(admissibles)]
        target = ranked[place]
        if action == "add" and target not in naive.ready | naive.gone:
            queue.add(target)
            naive.ready.add(target)
        best = naive.peek(admissible) if action == "best" else target
        if action != "add" and best in naive.ready:
            queue.remove(best)
            naive.remove(best)
        chosen = queue.peek(admissible)
        assert chosen == naive.peek(admissible)
        assert list(queue.ahead_of(chosen)) == naive.ahead_of(chosen)
        assert list(queue.ahead_of(target)) == naive.ahead_of(target)


@given(st.booleans(), ACTIONS, st.lists(ADMISSIBLE, min_size=1, max_size=60))
def test_a_round_answers_as_its_definition(
    forward_first: bool, actions: list[tuple[str, int]], admissibles: list[Admissible]
) -> None:
    """The direction not dispatched last is first; chunks and microbatches as PAPER 5 says."""
    order, naive = RoundHint(forward_first=forward_first), NaiveRound(forward_first)
    order.begin_step(STEP)
    gone: set[TaskId] = set()
    for step, (action, place) in enumerate(actions):
        admissible = admissibles[step % len(admissibles)]
        target = STEP[place]
        if action == "add" and target not in naive.ready | gone:
            order.add(target)
            naive.ready.add(target)
        best = naive.peek(admissible)
        assert order.peek(admissible) == best
        assert not any(t in naive.ready and admissible(t) for t in order.ahead_of(best, 8))
        if action == "best" and best is not None:
            order.commit(best)
            naive.commit(best)
            gone.add(best)


def test_an_empty_queue_has_nothing_to_choose() -> None:
    """A step without tasks in a direction, such as the backwards of an evaluation."""
    queue = RankedQueue(())
    assert queue.peek(Admissible(any_forward=True)) is None
    assert list(queue.ahead_of(None)) == []


def test_a_queue_knows_its_tasks_and_their_places() -> None:
    """Also of tasks that were dispatched, since a place is one in the whole list."""
    queue = RankedQueue(tasks("0F1 0B0 0F0"))
    queue.add(task("0F1"))
    queue.remove(task("0F1"))
    assert [queue.position(each) for each in tasks("0F1 0B0 0F0")] == [0, 1, 2]
    assert task("0F1") in queue
    assert task("0B1") not in queue
    assert words(queue.ahead_of(task("0F0"))) == "0B0"


@pytest.mark.parametrize("reserved", [0, 3])
def test_forwards_that_are_held_back_cost_nothing_and_hide_nothing(reserved: int) -> None:
    """The one admissible forward is found behind, or before, many that are not."""
    ranked = tasks("0F1 0F3 0F2 0B5 0F0 0B0")
    queue = RankedQueue(ranked)
    for each in tasks("0F1 0F3 0F2 0F0 0B0"):
        queue.add(each)
    only = Admissible(any_forward=False, forward_microbatch=reserved)
    assert queue.peek(only) == task(f"0F{reserved}")
    queue.remove(task(f"0F{reserved}"))
    assert queue.peek(only) == task("0B0")

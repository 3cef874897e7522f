"""The named hint orders and how one is made: they rank, and only a commit moves them."""

import threading

import pytest

from rrfp_async.config import Config
from rrfp_async.hints import (
    AUTO,
    HINTS,
    Admissible,
    DirectionPriority,
    Execution,
    HintOrder,
    RankedHint,
    make_order,
    resolve_hint,
)
from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.topology import Topology
from tests.core.words import task, tasks, words

ANY = Admissible(any_forward=True)
NONE = Admissible(any_forward=False)
STEP = "0F0 0F1 0F2 0B0 0B1 0B2"


class NewestFirst(RankedHint):
    """What a user writes to have an order of their own."""

    def rank(self, task: TaskId) -> tuple[int, bool]:
        return (-task.microbatch, task.kind is TaskKind.F)


def name_of(hint: str | HintOrder) -> str:
    return Config(microbatches=1, hint=hint).hint_name


def begun(hint: str | HintOrder, ready: str = "", step: str = STEP) -> HintOrder:
    """A fresh order in a step of the tasks `step`, of which `ready` are ready."""
    ranking = Execution(binding=False, deterministic=True)
    order = make_order(resolve_hint(hint), Topology(1), 0, ranking)
    order.begin_step(tasks(step))
    for each in tasks(ready):
        order.add(each)
    return order


def dispatched(order: HintOrder, admissible: Admissible = ANY) -> str:
    """Peek and commit until nothing is left to choose."""
    chosen = []
    while (best := order.peek(admissible)) is not None:
        order.commit(best)
        chosen.append(best)
    return words(chosen)


@pytest.mark.parametrize(
    ("hint", "order"),
    [
        ("bf", "0B0 0F0 0B1 0F1 0B2 0F2"),
        ("fb", "0F0 0B0 0F1 0B1 0F2 0B2"),
        ("b-priority", "0B0 0B1 0B2 0F0 0F1 0F2"),
        ("f-priority", "0F0 0F1 0F2 0B0 0B1 0B2"),
    ],
)
def test_with_everything_ready_a_named_order_shows_its_character(hint: str, order: str) -> None:
    """Rounds alternate, priorities do not, and lower microbatches come first (PAPER 5)."""
    assert dispatched(begun(hint, "0B2 0F1 0F2 0B0 0B1 0F0")) == order


def test_the_known_names_are_the_papers_and_the_fields() -> None:
    """Exactly these; each call makes a new object."""
    assert set(HINTS) == {
        *("auto", "bf", "bfw", "bf-deep", "bfw-deep", "fb", "b-priority", "f-priority"),
        *("gpipe", "1f1b", "zb-h1"),
        *("looped-bfs", "interleaved", "interleaved-zb", "zbv", "dualpipev"),
    }
    assert resolve_hint("bf") is not resolve_hint("bf")


def test_the_automatic_hint_is_named_first_and_summed_up_as_the_default() -> None:
    """As `python -m rrfp_async hints` shows it."""
    assert next(iter(HINTS)) == AUTO == "auto"
    assert [name for name, hint in HINTS.items() if "the default" in hint.summary] == [AUTO]
    for explicit in set(HINTS) - {AUTO}:
        assert resolve_hint(explicit) is not resolve_hint(AUTO)


def test_the_automatic_hint_ranks_as_bfw_deep() -> None:
    """Rounds, the deeper chunk first, W last; some stages split, some whole; any limit."""
    split, mixed = (
        " ".join(f"{stage}{kind}{j}" for stage, kinds in stages for kind in kinds for j in range(3))
        for stages in ([(0, "FIW"), (4, "FIW")], [(0, "FB"), (4, "FIW")])
    )
    for step in (split, mixed):
        for admissible in (ANY, NONE, Admissible(any_forward=False, forward_microbatch=1)):
            auto, explicit = (begun(hint, step, step) for hint in ("auto", "bfw-deep"))
            assert auto.ahead_of(None, 99) == explicit.ahead_of(None, 99)
            assert dispatched(auto, admissible) == dispatched(explicit, admissible) != ""
    assert dispatched(begun("auto", mixed, mixed)) == (
        "4I0 4F0 4I1 4F1 4I2 4F2 0B0 0F0 0B1 0F1 0B2 0F2 4W0 4W1 4W2"
    )


@pytest.mark.parametrize("first", ["0F0", "0B0"])
def test_bf_and_fb_differ_only_before_the_first_dispatch(first: str) -> None:
    """Before it they prefer opposite directions; once both committed the same, they are one."""
    bf, fb = begun("bf", STEP), begun("fb", STEP)
    assert (bf.peek(ANY), fb.peek(ANY)) == (task("0B0"), task("0F0"))
    bf.commit(task(first))
    fb.commit(task(first))
    assert bf.ahead_of(None, 8) == fb.ahead_of(None, 8)
    assert dispatched(bf) == dispatched(fb) != ""


@pytest.mark.parametrize("hint", ["bf", "fb"])
def test_a_round_alternates_on_the_last_commit_and_not_on_a_peek(hint: str) -> None:
    """Peeks in between, of either outcome, do not take a turn."""
    order = begun(hint, STEP)
    order.commit(task("0F0"))
    for admissible in (ANY, NONE, ANY, ANY):
        assert order.peek(admissible) == task("0B0")
    order.commit(task("0B0"))
    assert order.peek(NONE) == task("0B1")
    assert [order.peek(ANY) for _ in range(3)] == tasks("0F1 0F1 0F1")


def test_the_turn_follows_what_was_committed_and_not_what_was_peeked() -> None:
    """A commit of another task than the best one counts by its own direction."""
    order = begun("bf", STEP)
    assert order.peek(ANY) == task("0B0")
    order.commit(task("0F1"))
    assert order.peek(ANY) == task("0B0")
    order.commit(task("0B0"))
    assert order.peek(ANY) == task("0F0")


@pytest.mark.parametrize(
    ("hint", "ready", "order"),
    [
        ("bf", "0F0 0F1 0F2", "0F0 0F1 0F2"),
        ("fb", "0B0 0B1", "0B0 0B1"),
        ("b-priority", "0F1 0F0", "0F0 0F1"),
        ("f-priority", "0B1 0B0", "0B0 0B1"),
        ("bf", "0F0 0F1 0F2 0B1", "0B1 0F0 0F1 0F2"),
    ],
)
def test_a_direction_with_nothing_ready_is_passed_over_at_once(
    hint: str, ready: str, order: str
) -> None:
    """No order waits for the direction it would rather run."""
    assert dispatched(begun(hint, ready)) == order


def test_a_direction_passed_over_still_has_the_turn() -> None:
    """BF ran two forwards for want of a backward: one that comes now is next."""
    order = begun("bf", "0F0 0F1 0F2")
    order.commit(task("0F0"))
    order.commit(task("0F1"))
    order.add(task("0B0"))
    assert order.peek(ANY) == task("0B0")


@pytest.mark.parametrize(("hint", "first"), [("bf", "0B0"), ("fb", "0F0")])
def test_a_step_begins_a_new_round(hint: str, first: str) -> None:
    """Nothing of the last step counts: neither its turn nor its tasks."""
    order = begun(hint, STEP)
    order.commit(task(first))
    order.begin_step(tasks(STEP))
    assert order.peek(ANY) is None
    for each in tasks(STEP):
        order.add(each)
    assert order.peek(ANY) == task(first)


@pytest.mark.parametrize("hint", ["bf", "fb", "b-priority", "f-priority"])
def test_a_forward_that_is_not_admissible_is_not_ready(hint: str) -> None:
    """Held back, a forward neither blocks the backwards nor is chosen (DESIGN 6)."""
    assert dispatched(begun(hint, STEP), NONE) == "0B0 0B1 0B2"
    order = begun(hint, "0F0 0F1 0F2")
    assert order.peek(NONE) is None
    assert order.peek(Admissible(any_forward=False, forward_microbatch=2)) == task("0F2")
    assert order.peek(Admissible(any_forward=False, forward_microbatch=5)) is None


@pytest.mark.parametrize("hint", [*sorted(set(HINTS) - {"zbv", "dualpipev"}), NewestFirst()])
def test_peeking_changes_nothing(hint: str | HintOrder) -> None:
    """An order that was peeked at runs the same course as one that was not."""
    peeked, plain = begun(hint, STEP), begun(hint, STEP)
    for admissible in (NONE, ANY, Admissible(any_forward=False, forward_microbatch=1), NONE):
        peeked.peek(admissible)
        peeked.ahead_of(peeked.peek(admissible), 8)
    assert dispatched(peeked) == dispatched(plain)


@pytest.mark.parametrize("hint", ["bf", "fb", "b-priority", "f-priority"])
def test_chunks_run_forwards_from_the_lowest_and_backwards_from_the_highest(hint: str) -> None:
    """Within a direction the chunk ranks before the microbatch (PAPER 5)."""
    step = "0F0 0F1 4F0 4F1 0B0 0B1 4B0 4B1"
    chosen = dispatched(begun(hint, step, step)).split()
    assert [word for word in chosen if "F" in word] == ["0F0", "0F1", "4F0", "4F1"]
    assert [word for word in chosen if "B" in word] == ["4B0", "4B1", "0B0", "0B1"]


def test_what_a_round_passes_over_begins_with_the_direction_whose_turn_it_is() -> None:
    """All of that direction, then what ranks above the choice in its own."""
    order = begun("bf", "0F2")
    assert words(order.ahead_of(task("0F2"), 8)) == "0B0 0B1 0B2 0F0 0F1"
    assert words(order.ahead_of(task("0B1"), 8)) == "0B0"
    assert words(order.ahead_of(task("0F2"), 4)) == "0B0 0B1 0B2 0F0"
    assert words(order.ahead_of(task("0F2"), 2)) == "0B0 0B1"
    order.commit(task("0B0"))
    assert words(order.ahead_of(task("0B1"), 8)) == "0F0 0F1 0F2"
    assert words(order.ahead_of(None, 8)) == "0F0 0F1 0F2 0B1 0B2"


def test_a_ranked_order_has_positions_and_a_round_has_none() -> None:
    """A place is the one in the step's list, whatever ran since."""
    ranked = begun("f-priority", STEP)
    ranked.commit(task("0F0"))
    assert [ranked.position(each) for each in tasks("0F0 0F2 0B0 0B2")] == [0, 2, 3, 5]
    assert begun("bf", STEP).position(task("0F0")) is None


def test_a_hint_of_ten_lines_is_enough_for_an_order_of_ones_own() -> None:
    """Deriving from RankedHint and giving `rank` yields the order, positions and what is ahead."""
    order = begun(NewestFirst(), "0F0 0F1 0F2 0B2")
    assert order.position(task("0B2")) == 0
    assert words(order.ahead_of(task("0F0"), 3)) == "0B2 0F2 0B1"
    assert dispatched(order) == "0B2 0F2 0F1 0F0"


def test_equal_ranks_keep_the_order_of_the_step() -> None:
    """Ties never compare the tasks, and every rank breaks them alike."""

    class Indifferent(RankedHint):
        def rank(self, task: TaskId) -> int:
            return 0

    assert dispatched(begun(Indifferent(), "0B2 0F1 0B0")) == "0F1 0B0 0B2"


def test_a_hint_given_as_an_object_is_copied() -> None:
    """Two ranks given one object share no state, and the object stays as it was."""
    given = NewestFirst()
    one, other = begun(given, STEP), begun(given, STEP)
    assert len({id(given), id(one), id(other)}) == 3
    assert dispatched(one) != ""
    assert other.peek(ANY) == task("0B2")
    assert given.peek(ANY) is None
    started = begun(other)
    assert started.peek(ANY) is None
    assert other.peek(ANY) == task("0B2")


def test_the_copy_of_a_hint_is_deep() -> None:
    """Also what the object holds is its own on each rank, such as a list kept across steps."""

    class Remembers(NewestFirst):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[TaskId] = []

        def commit(self, task: TaskId) -> None:
            self.seen.append(task)
            super().commit(task)

    given = Remembers()
    one, other = begun(given, STEP), resolve_hint(given)
    one.commit(task("0B2"))
    assert isinstance(one, Remembers)
    assert isinstance(other, Remembers)
    assert (one.seen, other.seen, given.seen) == ([task("0B2")], [], [])


@pytest.mark.parametrize("hint", ["zb", "B-Priority", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(hint: str) -> None:
    """The error quotes the name and lists what would do."""
    with pytest.raises(ValueError, match="is not known") as caught:
        resolve_hint(hint)
    assert repr(hint) in str(caught.value)
    assert all(name in str(caught.value) for name in HINTS)


def test_an_object_without_the_base_class_is_refused_with_the_known_names() -> None:
    """Looking like an order is not being one; a class is not its instance."""

    class Duck:
        begin_step = add = peek = commit = print

    for hint in (Duck(), NewestFirst, HINTS["bf"].make):
        with pytest.raises(ValueError, match="HintOrder") as caught:
            resolve_hint(hint)
        assert type(hint).__name__ in str(caught.value)
        assert all(name in str(caught.value) for name in HINTS)


def test_a_hint_is_called_by_its_name_or_by_its_class() -> None:
    """What messages and results show."""
    assert name_of("bf") == "bf"
    assert name_of(NewestFirst()) == "NewestFirst"


def test_a_hint_that_cannot_be_copied_is_refused_with_what_to_do() -> None:
    """A lock in its state, say: every rank needs a copy of its own."""

    class Locked(DirectionPriority):
        def __init__(self) -> None:
            super().__init__(forward_first=True)
            self.lock = threading.Lock()

    with pytest.raises(ValueError, match=r"cannot be copied .*keep only plain data"):
        resolve_hint(Locked())


def test_a_hint_may_name_itself_so_that_ranks_can_tell_instances_apart() -> None:
    """What ranks compare is the name, by default the class's."""

    class Tuned(DirectionPriority):
        def __init__(self, weight: int) -> None:
            super().__init__(forward_first=True)
            self.weight = weight

        @property
        def name(self) -> str:
            return f"Tuned({self.weight})"

    assert name_of(Tuned(1)) == "Tuned(1)" != name_of(Tuned(2))

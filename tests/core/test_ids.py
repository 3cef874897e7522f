"""Ids are plain values whose repr is a word."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_async.ids import Edge, Link, TaskId, TaskKind, TensorSpec


@pytest.mark.parametrize(
    ("task", "word"),
    [
        (TaskId(2, TaskKind.F, 5), "2F5"),
        (TaskId(0, TaskKind.B, 0), "0B0"),
        (TaskId(11, TaskKind.I, 120), "11I120"),
        (TaskId(3, TaskKind.W, 1), "3W1"),
        (TaskId(7, TaskKind.R, 9), "7R9"),
    ],
)
def test_a_task_is_a_word_and_the_word_is_the_task(task: TaskId, word: str) -> None:
    """`repr` and `str` write stage, kind, microbatch, and `parse` reads them in that order."""
    assert repr(task) == str(task) == word
    assert TaskId.parse(word) == task


@given(st.integers(0, 10_000), st.sampled_from(TaskKind), st.integers(0, 10_000))
def test_parse_undoes_repr(stage: int, kind: TaskKind, microbatch: int) -> None:
    """No task is lost in its word, however many digits it has."""
    task = TaskId(stage, kind, microbatch)
    assert TaskId.parse(repr(task)) == task


@pytest.mark.parametrize("word", ["", "F5", "2F", "2X5", "2f5", "-1F5", "2F5 ", "2F5\n", "2F5B1"])
def test_a_word_that_is_no_task_is_refused(word: str) -> None:
    """The error shows the word and an example of a right one."""
    with pytest.raises(ValueError, match="such as '2F5'") as caught:
        TaskId.parse(word)
    assert repr(word) in str(caught.value)


def test_equal_tasks_are_one_key_and_unequal_ones_are_not() -> None:
    """Sets and dicts of tasks work by value, also across a copy and a pickle."""
    task = TaskId(1, TaskKind.F, 2)
    others = {TaskId(2, TaskKind.F, 1), TaskId(1, TaskKind.B, 2), TaskId(1, TaskKind.F, 3)}
    for same in (TaskId(1, TaskKind.F, 2), copy.deepcopy(task), pickle.loads(pickle.dumps(task))):
        assert {task: "here"}[same] == "here"
    assert task not in others
    assert len(others) == 3


def test_edges_and_links_have_a_direction() -> None:
    """An edge is not its reverse, and no link equals an edge between the same numbers."""
    assert Edge(0, 1) != Edge(1, 0)
    assert Link(0, 1) != Link(1, 0)
    assert len({Link(0, 1), Edge(0, 1)}) == 2
    assert (str(Edge(0, 1)), str(Link(1, 0))) == ("0->1", "1=>0")


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (TaskId(0, TaskKind.F, 0), "stage"),
        (Edge(0, 1), "source"),
        (Link(0, 1), "source"),
        (TensorSpec((2, 3), "float32"), "dtype"),
    ],
)
def test_ids_cannot_be_changed(value: object, field: str) -> None:
    """Ids cross every boundary, so they are frozen."""
    with pytest.raises(AttributeError):
        setattr(value, field, 9)


def test_a_tensor_wants_no_gradient_unless_it_says_so() -> None:
    """The default of a spec is the shape of a token or label tensor."""
    assert not TensorSpec((4,), "int64").requires_grad


@pytest.mark.parametrize("word", ["٢F5", "02F5", "2F05", "2F-1"])
def test_a_task_has_one_word_only(word: str) -> None:
    """Other digits and leading zeros are refused, so words can be compared as tasks."""
    with pytest.raises(ValueError, match="is no task"):
        TaskId.parse(word)

"""Tasks by their words, so that a test reads like the order it is about."""

from collections.abc import Iterable

from rrfp_async.ids import TaskId


def task(word: str) -> TaskId:
    """The task that `word` names."""
    return TaskId.parse(word)


def tasks(words: str) -> list[TaskId]:
    """The tasks named in `words`, which are parted by spaces."""
    return [TaskId.parse(word) for word in words.split()]


def words(listed: Iterable[TaskId]) -> str:
    """The inverse of `tasks`."""
    return " ".join(map(str, listed))

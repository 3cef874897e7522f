"""Jobs that end with their test, or with their module, and leave no process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks.launching import WORKER, ByHand, Job, start_torchrun
from tests.ranks.plan import Plan

Launch = Callable[..., Job]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts the worker under torchrun: `launch(ranks, plan, ...)`; at most one job a test."""
    jobs: list[Job] = []

    def start(
        ranks: int, *plans: Plan, script: Path = WORKER, words: tuple[str, ...] = (), **options: int
    ) -> Job:
        arguments = [*words, *(word for plan in plans for word in plan.words())]
        jobs.append(start_torchrun(tmp_path, ranks, script, arguments, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[Callable[[int], ByHand]]:
    """Starts workers one by one: `by_hand(world_size).start(...)`."""
    made: list[ByHand] = []

    def make(world_size: int) -> ByHand:
        made.append(ByHand(tmp_path, world_size))
        return made[-1]

    yield make
    for each in made:
        each.job.end()

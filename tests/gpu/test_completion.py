"""Work in a thread's queue: it runs, or is taken back, or falls with what it was queued behind."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rrfp_async.gpu.completion import WaitingThread, Work

SOON_S = 2.0


@pytest.fixture
def thread() -> Iterator[WaitingThread]:
    """A thread that is gone a second after it was closed."""
    thread = WaitingThread(time.perf_counter, name="rrfp-completion-test")
    yield thread
    thread.close()
    assert thread.join(1.0)


class Steps:
    """Functions that note when they run; `held` ones wait to be let go."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.begun = threading.Event()
        self.let_go = threading.Event()

    def plain(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.ran.append(name)
            return name

        return run

    def held(self, name: str, error: Exception | None = None) -> Callable[[], str]:
        def run() -> str:
            self.ran.append(name)
            self.begun.set()
            assert self.let_go.wait(5.0)
            if error is not None:
                raise error
            return name

        return run

    async def until_begun(self) -> None:
        async with asyncio.timeout(SOON_S):
            while not self.begun.is_set():  # noqa: ASYNC110 - another thread is watched
                await asyncio.sleep(0.001)


@pytest.fixture
def steps() -> Iterator[Steps]:
    steps = Steps()
    yield steps
    steps.let_go.set()


async def drained(thread: WaitingThread) -> None:
    """Wait until all that was queued so far has run or was passed over."""
    async with asyncio.timeout(SOON_S):
        await thread.submit(lambda: None)


async def test_withdrawn_work_does_not_run(thread: WaitingThread, steps: Steps) -> None:
    """What comes after it does; whoever awaits it is told nothing."""
    first = thread.queue(steps.held("first"))
    second = thread.queue(steps.plain("second"))
    third = thread.queue(steps.plain("third"))
    await steps.until_begun()
    assert second.withdraw()
    assert second.withdraw(), "it still will not run"
    steps.let_go.set()
    await drained(thread)
    assert steps.ran == ["first", "third"]
    assert ((await first.future).value, (await third.future).value) == ("first", "third")
    assert not second.future.done()


async def test_begun_work_cannot_be_withdrawn(thread: WaitingThread, steps: Steps) -> None:
    """Neither while it runs nor when it has; its result comes."""
    work = thread.queue(steps.held("work"))
    await steps.until_begun()
    assert not work.withdraw()
    steps.let_go.set()
    assert (await work.future).value == "work"
    assert not work.withdraw()


async def test_failed_work_cannot_be_withdrawn(thread: WaitingThread, steps: Steps) -> None:
    """It has run; what it raised is told."""
    steps.let_go.set()
    work = thread.queue(steps.held("work", ArithmeticError("no")))
    with pytest.raises(ArithmeticError, match="no"):
        await work.future
    assert not work.withdraw()


async def test_work_runs_or_is_withdrawn_and_never_both(thread: WaitingThread) -> None:
    """Taken back at the very moment when its turn comes: both sides agree on what happened."""
    outcomes = set()
    for number in range(300):
        ran: list[int] = []
        work = thread.queue(lambda number=number, ran=ran: ran.append(number))
        time.sleep(1e-6 * (number % 40))  # noqa: ASYNC251 - the other thread is to be met
        withdrawn = work.withdraw()
        await drained(thread)
        assert ran == ([] if withdrawn else [number])
        assert work.future.done() is not withdrawn
        outcomes.add(withdrawn)
    assert False in outcomes


async def test_work_behind_one_that_fails_falls_with_it(
    thread: WaitingThread, steps: Steps
) -> None:
    """It does not run, its awaiter is cancelled; what was queued on its own runs."""
    first = thread.queue(steps.held("first", ArithmeticError("no")))
    second = thread.queue(steps.plain("second"), before=first)
    other = thread.queue(steps.plain("other"))
    steps.let_go.set()
    with pytest.raises(ArithmeticError, match="no"):
        await first.future
    async with asyncio.timeout(SOON_S):
        with pytest.raises(asyncio.CancelledError):
            await second.future
        assert (await other.future).value == "other"
    assert steps.ran == ["first", "other"]
    assert second.withdraw()


async def test_work_queued_after_the_one_before_it_failed_falls_too(
    thread: WaitingThread, steps: Steps
) -> None:
    """The failure may not have been told yet: what counts is that it has happened."""
    steps.let_go.set()
    first = thread.queue(steps.held("first", ArithmeticError("no")))
    await drained(thread)
    second = thread.queue(steps.plain("second"), before=first)
    await drained(thread)
    assert (steps.ran, second.future.cancelled()) == (["first"], True)
    assert isinstance(first.future.exception(), ArithmeticError)


@pytest.mark.parametrize("withdrawn", [False, True], ids=["done", "withdrawn"])
async def test_work_behind_one_that_does_not_fail_runs(
    thread: WaitingThread, steps: Steps, withdrawn: bool
) -> None:
    """Whether that one has run or was taken back."""
    holding = thread.queue(steps.held("holding"))
    await steps.until_begun()
    first = thread.queue(steps.plain("first"))
    second = thread.queue(steps.plain("second"), before=first)
    if withdrawn:
        assert first.withdraw()
    steps.let_go.set()
    assert (await second.future).value == "second"
    assert steps.ran == ["holding", *([] if withdrawn else ["first"]), "second"]
    await holding.future


async def test_withdrawn_work_that_would_have_fallen_is_told_nothing_new(
    thread: WaitingThread, steps: Steps
) -> None:
    """Taken back before the one before it failed: it does not run."""
    first = thread.queue(steps.held("first", ArithmeticError("no")))
    second = thread.queue(steps.plain("second"), before=first)
    await steps.until_begun()
    assert second.withdraw()
    steps.let_go.set()
    with pytest.raises(ArithmeticError):
        await first.future
    await drained(thread)
    assert steps.ran == ["first"]


async def test_work_keeps_nothing_of_the_one_before_it(thread: WaitingThread, steps: Steps) -> None:
    """A chain of a step's tasks is not held by its last link."""
    steps.let_go.set()
    first = thread.queue(steps.held("first"))
    second: Work[str] = thread.queue(steps.plain("second"), before=first)
    await second.future
    await first.future
    assert second._before is None


async def test_a_cancelled_future_does_not_take_the_work_back(
    thread: WaitingThread, steps: Steps
) -> None:
    """Only `withdraw` does."""
    holding = thread.queue(steps.held("holding"))
    await steps.until_begun()
    work = thread.queue(steps.plain("work"))
    work.future.cancel()
    steps.let_go.set()
    await holding.future
    await drained(thread)
    assert steps.ran == ["holding", "work"]


def test_work_for_a_loop_that_has_closed_falls_in_silence(
    thread: WaitingThread, steps: Steps
) -> None:
    """Queued behind one that fails, on a loop that is gone when its turn comes."""

    async def leave() -> None:
        first = thread.queue(steps.held("first", ArithmeticError("no")))
        thread.queue(steps.plain("second"), before=first)
        first.future.cancel()

    asyncio.run(leave())
    steps.let_go.set()
    asyncio.run(drained(thread))
    assert steps.ran == ["first"]

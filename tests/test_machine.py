"""The tests' own clocks: what our code takes is reported, what the machine takes is left out."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests import machine
from tests.machine import Kept, Tick, Ticker, kept_between, took

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells it on Linux")
BUSY = "import os; os.sched_setaffinity(0, [{core}])\nprint(flush=True)\nwhile True: pass"


@pytest.fixture(autouse=True)
def unstolen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stolen from other cores would be left out of what is to be reported here."""
    monkeypatch.setattr(machine, "_stolen_s", lambda: 0.0)


@pytest.fixture
def contended() -> Iterator[None]:
    """This thread has one core, which it shares with a busy process."""
    before = os.sched_getaffinity(0)
    core = min(before)
    os.sched_setaffinity(0, [core])
    command = [sys.executable, "-c", BUSY.format(core=core)]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()  # it has begun
                yield
            finally:
                process.kill()
    finally:
        os.sched_setaffinity(0, before)


def burn(cpu_s: float) -> None:
    """Compute for so long, by this thread's own clock."""
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


async def test_a_tick_that_is_blocked_is_reported() -> None:
    """A blocking sleep of 0.1 s in the loop is a gap of at least 0.09 s."""
    async with Ticker() as ticker:
        await asyncio.sleep(0.05)
        time.sleep(0.1)  # noqa: ASYNC251 - the fault to be found
        await asyncio.sleep(0.05)
    assert max(ticker.gaps) >= 0.09


async def test_what_blocks_the_loop_at_the_very_end_is_reported() -> None:
    """Though no tick comes any more."""
    async with Ticker() as ticker:
        await asyncio.sleep(0.05)
        time.sleep(0.1)  # noqa: ASYNC251 - the fault to be found
    assert ticker.gaps[-1] >= 0.09


async def test_an_error_in_the_block_comes_through_and_no_task_is_left() -> None:
    """The ticker ends with its block."""
    with pytest.raises(ArithmeticError):
        async with Ticker():
            raise ArithmeticError
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_call_that_blocks_or_computes_counts_in_full() -> None:
    """A sleep, a wait for a lock, a computation."""
    with took() as sleeping:
        time.sleep(0.1)
    with took() as waiting:
        threading.Event().wait(0.1)
    with took() as computing:
        burn(0.1)
    for taken in (sleeping, waiting, computing):
        assert 0.07 <= taken.own_s <= taken.wall_s  # what is left out is an upper bound


@ON_LINUX
def test_time_on_a_run_queue_is_left_out(contended: None) -> None:
    """Of 0.4 s of computing on half a core, most of the waiting for that core."""
    with took() as taken:
        burn(0.4)
    assert taken.wall_s - taken.own_s > 0.2


@ON_LINUX
def test_a_thread_that_waited_counts_as_well(contended: None) -> None:
    """The sum is over all threads, and one that ends takes nothing away."""
    kept, burnt, may_end = Kept(), threading.Event(), threading.Event()

    def work() -> None:
        burn(0.4)
        burnt.set()
        may_end.wait(30.0)

    thread = threading.Thread(target=work)  # which inherits this one's core
    thread.start()
    assert burnt.wait(30.0)
    waited_s = kept.so_far_s()
    may_end.set()
    thread.join(30.0)
    assert kept.so_far_s() >= waited_s > 0.2


def test_threads_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one counts from its beginning, also under the number of one that has ended."""
    second = 1_000_000_000
    readings = iter(
        [
            {b"1": 5 * second, b"2": 7 * second},
            {b"1": 6 * second, b"2": 7 * second, b"3": 2 * second},
            {b"1": 6 * second},
            {b"1": 6 * second, b"2": 3 * second},
            {b"1": 6 * second, b"2": 1 * second},
        ]
    )
    monkeypatch.setattr(machine, "_waited_ns", lambda: next(readings))
    kept = Kept()
    assert [kept.so_far_s() for _ in range(4)] == [3.0, 3.0, 6.0, 7.0]


def test_what_is_stolen_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line of /proc/stat tells it, in hundredths of a second over all cores."""
    lines = iter([b"cpu  1 2 3 4 5 6 7 80 9 10\ncpu0 1", b"cpu  9 9 9 9 9 9 9 105 9 10\ncpu0 1"])
    monkeypatch.undo()  # `unstolen`
    monkeypatch.setattr(machine, "_thread_ids", list)
    monkeypatch.setattr(machine, "_read", lambda path: next(lines))
    assert Kept().so_far_s() == pytest.approx(0.25)


def test_where_nothing_is_told_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc, and for a thread that ended while it was looked up."""
    monkeypatch.setattr(machine, "_read", lambda path: b"")
    kept = Kept()
    burn(0.01)
    assert kept.so_far_s() == 0.0


def test_between_two_moments_the_ticks_around_them_count() -> None:
    """From the last tick before the first moment to the first tick after the second."""
    ticks = [Tick(1.0, 0.0, 0.1), Tick(2.0, 0.1, 0.1), Tick(3.0, 0.5, 0.6), Tick(4.0, 0.6, 0.9)]
    assert kept_between(ticks, 2.5, 2.6) == pytest.approx(0.5)
    assert kept_between(ticks, 1.0, 4.0) == pytest.approx(0.9)
    assert kept_between(ticks, 2.0, 2.0) == pytest.approx(0.0)

"""Ordinary asyncio code on the virtual loop: timeouts, task groups, events, exceptions, Ctrl-C."""

import asyncio
import signal
from typing import Any

import pytest

from tests.sim.guarded import clock, play


def test_a_timeout_strikes_at_its_time() -> None:
    """And not where the work was quicker."""

    async def main() -> tuple[float, float]:
        async with asyncio.timeout(5.0):
            await asyncio.sleep(4.0)
        quick_s = clock().time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.sleep(6.0)
        return quick_s, clock().time()

    assert play(main()) == (4.0, 9.0)


def test_a_task_group_ends_when_a_task_fails() -> None:
    """At the virtual time of the failure, with its exception."""

    async def fail() -> None:
        await asyncio.sleep(2.0)
        raise KeyError("mine")

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(100.0))
            group.create_task(fail())

    async def main() -> float:
        with pytest.raises(ExceptionGroup) as caught:
            await both()
        assert caught.group_contains(KeyError, match="mine")
        return clock().time()

    assert play(main()) == 2.0


def test_an_event_wakes_all_who_wait_at_its_time() -> None:
    """Events and queues work as on any loop."""

    async def main() -> list[float]:
        event, times = asyncio.Event(), list[float]()
        queue: asyncio.Queue[float] = asyncio.Queue(1)

        async def wait() -> None:
            await event.wait()
            times.append(clock().time())
            await queue.put(clock().time())

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(wait())
            clock().call_at(1.25, event.set)
            for _ in range(3):
                times.append(await queue.get())
        return times

    assert play(main()) == [1.25] * 6


def test_what_main_raises_is_raised() -> None:
    """As from asyncio.run."""

    async def main() -> None:
        await asyncio.sleep(1.0)
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        play(main())


def test_a_failing_callback_is_reported_and_time_goes_on() -> None:
    """To the loop's exception handler."""
    told: list[Any] = []

    async def main() -> float:
        clock().set_exception_handler(lambda _loop, context: told.append(context["exception"]))
        clock().call_later(1.0, lambda: 1 / 0)
        await asyncio.sleep(2.0)
        return clock().time()

    assert play(main()) == 2.0
    assert [type(error) for error in told] == [ZeroDivisionError]


def test_ctrl_c_ends_it() -> None:
    """The runner's own handling works without a sleeping selector."""

    async def main() -> None:
        clock().call_later(1.0, signal.raise_signal, signal.SIGINT)
        await asyncio.sleep(2.0)

    with pytest.raises(KeyboardInterrupt):
        play(main())

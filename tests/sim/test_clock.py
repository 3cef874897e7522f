"""The virtual loop: when time passes, what an instant is, and that nothing hangs."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.machine import took
from tests.sim.guarded import clock, play

DAY_S = 86_400.0


async def sleep_and_tell(delay_s: float, tell: Callable[[float], None]) -> None:
    await asyncio.sleep(delay_s)
    tell(clock().time())


# -- time -------------------------------------------------------------------------------------


def test_time_begins_at_zero_and_passes_only_when_idle() -> None:
    """However much is done at an instant, it stays that instant."""

    async def main() -> list[float]:
        times = [clock().time()]
        for _ in range(100):
            await asyncio.sleep(0)
        times.append(clock().time())
        await asyncio.sleep(1.5)
        times.append(clock().time())
        return times

    assert play(main()) == [0.0, 0.0, 1.5]


def test_a_virtual_week_takes_no_real_time() -> None:
    """Nothing sleeps."""

    async def main() -> None:
        for _ in range(7):
            await asyncio.sleep(DAY_S)

    with took() as playing:
        play(main())
    assert playing.own_s < 1.0


def test_a_ready_task_runs_before_time_passes() -> None:
    """A timer waits for those who are busy, though they yield."""
    order: list[str] = []

    async def busy() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        order.append("busy")

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(sleep_and_tell(1e-6, lambda _: order.append("slept")))
            group.create_task(busy())

    play(main())
    assert order == ["busy", "slept"]


def test_timers_fire_in_order_of_time() -> None:
    """Whatever the order they were set in."""
    times: list[float] = []

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for delay_s in (3.0, 1.0, 2.0, 0.5, 2.5):
                group.create_task(sleep_and_tell(delay_s, times.append))

    play(main())
    assert times == [0.5, 1.0, 2.0, 2.5, 3.0]


def test_a_cancelled_timer_does_not_move_time() -> None:
    """Time goes to the next that is still set."""

    async def main() -> float:
        clock().call_later(5.0, print).cancel()
        await asyncio.sleep(7.0)
        return clock().time()

    assert play(main()) == 7.0


def test_a_timer_in_the_past_does_not_turn_time_back() -> None:
    """It fires now."""
    times: list[float] = []

    async def main() -> None:
        await asyncio.sleep(2.0)
        clock().call_at(1.0, lambda: times.append(clock().time()))
        clock().call_later(-1.0, lambda: times.append(clock().time()))
        await asyncio.sleep(1.0)

    play(main())
    assert times == [2.0, 2.0]


@pytest.mark.parametrize("days", [1.2, 2, 12, 13, 30, 365])
def test_timers_lie_beyond_a_day(days: float) -> None:
    """A selector waits a day at most in asyncio; virtual time has no such horizon."""

    async def main() -> list[float]:
        await asyncio.sleep(days * DAY_S)
        times = [clock().time()]
        await asyncio.sleep(0.25)
        return [*times, clock().time()]

    assert play(main()) == pytest.approx([days * DAY_S, days * DAY_S + 0.25], rel=0, abs=1e-6)


# -- an instant -------------------------------------------------------------------------------


@pytest.mark.parametrize("other_s", [0.3, 0.1 + 0.2, 0.3 + 5e-11, 0.3 - 5e-11])
def test_nearly_equal_times_are_one_instant(other_s: float) -> None:
    """Who settles then has seen both."""
    seen: list[float] = []

    async def main() -> int:
        clock().call_at(other_s, seen.append, other_s)
        clock().call_at(0.3, seen.append, 0.3)
        await asyncio.sleep(min(0.3, other_s))
        await clock().settle()
        return len(seen)

    assert play(main()) == 2


def test_a_nanosecond_apart_is_another_instant() -> None:
    """Real differences are kept."""
    seen: list[float] = []

    async def main() -> int:
        clock().call_at(0.3 + 1e-9, seen.append, 0.0)
        await asyncio.sleep(0.3)
        await clock().settle()
        return len(seen)

    assert play(main()) == 0


# -- settling ---------------------------------------------------------------------------------


def test_who_settles_sees_all_that_happens_at_the_instant() -> None:
    """Chains of callbacks and tasks started by tasks included; and no time passes."""
    done: list[int] = []

    async def chain(length: int) -> None:
        await asyncio.sleep(0)
        if length:
            await asyncio.create_task(chain(length - 1))
        done.append(length)

    async def main() -> tuple[int, float]:
        await asyncio.sleep(1.0)
        task = asyncio.create_task(chain(10))
        await clock().settle()
        seen = len(done)
        await task
        return seen, clock().time()

    assert play(main()) == (11, 1.0)


@pytest.mark.parametrize("later_s", [0.0, 1e-17, 5e-11])
def test_who_settles_sees_the_timers_of_the_instant(later_s: float) -> None:
    """A timer that is due at this very instant is part of it, though nothing else is left to do."""
    order: list[str] = []

    async def main() -> None:
        await asyncio.sleep(0.3)
        clock().call_at(clock().time() + later_s, order.append, "timer")
        await clock().settle()
        order.append("settled")
        await asyncio.sleep(1.0)

    play(main())
    assert order == ["timer", "settled"]


def test_several_who_settle_are_released_together() -> None:
    """None waits for what another does after it settled; who settles again sees that."""
    done: list[str] = []
    seen: dict[str, list[str]] = {}

    async def settler(name: str) -> None:
        await clock().settle()
        seen[name] = list(done)
        await asyncio.sleep(0)
        done.append(name)
        await clock().settle()
        seen[f"{name} again"] = sorted(done)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(settler(name))

    play(main())
    assert [seen[name] for name in "abc"] == [[], [], []]
    assert [seen[f"{name} again"] for name in "abc"] == [["a", "b", "c"]] * 3


def test_who_settles_later_in_the_instant_is_released_in_it() -> None:
    """One task settles only after the others were released; still the time is the same."""

    async def late() -> float:
        await clock().settle()
        await clock().settle()
        await clock().settle()
        return clock().time()

    async def main() -> list[float]:
        tasks = [asyncio.create_task(late()) for _ in range(3)]
        clock().call_later(1.0, lambda: None)
        return [await task for task in tasks]

    assert play(main()) == [0.0, 0.0, 0.0]


def test_cancelling_one_who_settles_holds_up_nobody() -> None:
    """It is cancelled, the others are released, time goes on."""

    async def main() -> tuple[bool, bool, float]:
        gone = asyncio.create_task(clock().settle())
        stays = asyncio.create_task(clock().settle())
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone, stays])
        await clock().settle()
        await asyncio.sleep(1.0)
        return gone.cancelled(), stays.cancelled(), clock().time()

    assert play(main()) == (True, False, 1.0)


def test_a_timeout_can_end_what_waits_but_not_a_settling() -> None:
    """To settle takes no time, so no timeout can strike."""

    async def main() -> float:
        async with asyncio.timeout(1e-6):
            await clock().settle()
        return clock().time()

    assert play(main()) == 0.0


# -- no hangs ---------------------------------------------------------------------------------


async def waits_for_nothing() -> None:
    await asyncio.get_running_loop().create_future()


async def waits_for_each_other() -> None:
    first, second = asyncio.Event(), asyncio.Event()

    async def hold(mine: asyncio.Event, other: asyncio.Event) -> None:
        await other.wait()
        mine.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(hold(first, second))
        group.create_task(hold(second, first))


async def waits_after_timers() -> None:
    await asyncio.sleep(3.0)
    clock().call_later(1.0, lambda: None)
    clock().call_later(9.0, print).cancel()
    await asyncio.Queue[None]().get()


async def waits_after_settling() -> None:
    await clock().settle()
    await waits_for_nothing()


@pytest.mark.parametrize(
    "main", [waits_for_nothing, waits_for_each_other, waits_after_timers, waits_after_settling]
)
def test_a_deadlock_is_an_error(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Nothing is left that could end the waiting."""
    with pytest.raises(RuntimeError, match="nothing is left to happen"):
        play(main())


def test_a_deadlock_lets_everyone_clean_up() -> None:
    """What waits is cancelled when the loop closes."""
    cleaned: list[str] = []

    async def main() -> None:
        try:
            await waits_for_nothing()
        finally:
            cleaned.append("main")

    with pytest.raises(RuntimeError, match="nothing is left to happen"):
        play(main())
    assert cleaned == ["main"]

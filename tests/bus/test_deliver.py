"""What every twin of the bus must do with a handler that is given every message."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from rrfp_async.bus.base import Bus
from rrfp_async.bus.codec import encode
from rrfp_async.bus.messages import Envelope, Farewell, Message
from rrfp_async.errors import BusError
from tests.bus.conftest import OpenBuses
from tests.bus.sockets import until

SOON_S = 2.0


class Refused(Exception):
    """What a handler raises that has had enough."""


class Heard:
    """A handler: who sent which farewell; after so many it has had enough."""

    def __init__(self, most: int | None = None) -> None:
        self.farewells: list[tuple[int, int]] = []
        self._most = most

    def __call__(self, source: int, message: Message) -> None:
        assert isinstance(message, Farewell)
        self.farewells.append((source, message.steps))
        if len(self.farewells) == self._most:
            raise Refused(f"{self._most} are enough")

    async def until(self, count: int) -> None:
        await until(lambda: len(self.farewells) >= count)


def say(bus: Bus, numbers: range | list[int], *, to: int = 0) -> None:
    for number in numbers:
        bus.send_nowait(to, Farewell(number))


def numbered(numbers: range | list[int], source: int = 1) -> list[tuple[int, int]]:
    return [(source, number) for number in numbers]


@contextlib.asynccontextmanager
async def delivering(
    bus: Bus, handler: Callable[[int, Message], None]
) -> AsyncIterator["asyncio.Task[None]"]:
    """A task that delivers, cancelled at the end if it still does."""
    task = asyncio.create_task(bus.deliver(handler))
    await asyncio.sleep(0)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ended(task: "asyncio.Task[None]") -> BaseException:
    """What it ends with, soon."""
    async with asyncio.timeout(SOON_S):
        [outcome] = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(outcome, BaseException)
    return outcome


async def test_a_handler_gets_every_message_in_its_senders_order(open_buses: OpenBuses) -> None:
    """However senders interleave: none lost, none doubled, all counted."""
    heard = Heard()
    async with open_buses(4) as buses, delivering(buses[0], heard):
        senders = [1, 2, 3] * 100
        random.Random(2).shuffle(senders)
        numbers: dict[int, Iterator[int]] = {sender: iter(range(100)) for sender in (1, 2, 3)}
        for index, sender in enumerate(senders):
            say(buses[sender], [next(numbers[sender])])
            if index % 7 == 0:
                await asyncio.sleep(0)
        await heard.until(300)
        assert buses[0].statistics().received == 300
        assert buses[0].statistics().pending == 0
    for sender in (1, 2, 3):
        assert [n for n in heard.farewells if n[0] == sender] == numbered(range(100), sender)


async def test_what_came_before_is_delivered_before_what_comes(open_buses: OpenBuses) -> None:
    """Messages that wait already, and those that come while they are delivered."""
    async with open_buses(2) as buses:
        say(buses[1], range(20))
        await until(lambda: buses[0].statistics().pending == 20)
        heard = Heard()
        task = asyncio.create_task(buses[0].deliver(heard))
        say(buses[1], range(20, 40))
        await heard.until(40)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert heard.farewells == numbered(range(40))


@pytest.mark.parametrize("before", [True, False], ids=["messages wait", "messages come"])
async def test_a_handler_that_raises_ends_it_and_the_rest_waits(
    open_buses: OpenBuses, before: bool
) -> None:
    """The very exception; what came behind it goes to the next reader, whole and in order."""
    async with open_buses(2) as buses:
        heard = Heard(most=4)
        if before:
            say(buses[1], range(10))
            await until(lambda: buses[0].statistics().pending == 10)
        async with delivering(buses[0], heard) as task:
            if not before:
                say(buses[1], range(10))
            error = await ended(task)
        assert isinstance(error, Refused)
        assert heard.farewells == numbered(range(4))
        await until(lambda: buses[0].statistics().pending == 6)
        async with asyncio.timeout(SOON_S):
            assert await buses[0].next_message() == (1, Farewell(4))
        again = Heard()
        async with delivering(buses[0], again):
            say(buses[1], [10])
            await again.until(6)
        assert again.farewells == numbered(range(5, 11))


async def test_nobody_is_called_after_the_end(open_buses: OpenBuses) -> None:
    """Neither a handler that raised nor one that was cancelled hears another word."""
    async with open_buses(2) as buses:
        raised, cancelled = Heard(most=1), Heard()
        async with delivering(buses[0], raised) as task:
            say(buses[1], [0])
            await ended(task)
        async with delivering(buses[0], cancelled):
            pass
        say(buses[1], range(1, 4))
        await until(lambda: buses[0].statistics().pending == 3)
    assert (raised.farewells, cancelled.farewells) == (numbered([0]), [])


async def test_a_second_delivery_goes_on_where_the_first_ended(open_buses: OpenBuses) -> None:
    """Handler after handler, each cancelled or raising somewhere: together they hear all."""
    heard: list[tuple[int, int]] = []
    async with open_buses(2) as buses:
        say(buses[1], range(5))
        for index in range(30):
            handler = Heard(most=3 if index % 2 else None)
            async with delivering(buses[0], handler) as task:
                say(buses[1], range(5 * index + 5, 5 * index + 10))
                if index % 2:
                    assert isinstance(await ended(task), Refused)
                for _ in range(index % 3):
                    await asyncio.sleep(0)
            heard += handler.farewells
        last = Heard()
        async with delivering(buses[0], last):
            await last.until(155 - len(heard))
    assert heard + last.farewells == numbered(range(155))


async def test_cancelling_a_delivery_loses_nothing(open_buses: OpenBuses) -> None:
    """At any moment, message there or not: each is heard by the handler or by the next reader."""
    heard = Heard()
    async with open_buses(2) as buses:
        for number in range(60):
            task = asyncio.create_task(buses[0].deliver(heard))
            for _ in range(number % 3):
                await asyncio.sleep(0)
            say(buses[1], [number])
            for _ in range(number % 2):
                await asyncio.sleep(0)
            task.cancel()
            say(buses[1], [number + 1000])
            assert isinstance(await ended(task), asyncio.CancelledError)
        async with delivering(buses[0], heard):
            await heard.until(120)
    assert heard.farewells == numbered([n for k in range(60) for n in (k, k + 1000)])


async def test_closing_ends_a_delivery(open_buses: OpenBuses) -> None:
    """Under way, and one that begins on a closed end: the error says so; no other is hurt."""
    async with open_buses(3) as buses:
        heard, other = Heard(), Heard()
        async with delivering(buses[0], heard) as task, delivering(buses[1], other) as going_on:
            buses[0].close()
            error = await ended(task)
            assert isinstance(error, BusError)
            assert "rank 0 is closed" in str(error)
            say(buses[2], [7], to=1)
            await until(lambda: (2, 7) in other.farewells)
            assert not going_on.done()
        with pytest.raises(BusError, match="rank 0 is closed"):
            async with asyncio.timeout(SOON_S):
                await buses[0].deliver(heard)
    assert heard.farewells == []


async def test_a_handler_may_close_its_end(open_buses: OpenBuses) -> None:
    """From inside: it ends as closed, and hears nothing more."""
    async with open_buses(2) as buses:
        heard = Heard()

        def closing(source: int, message: Message) -> None:
            heard(source, message)
            buses[0].close()

        async with delivering(buses[0], closing) as task:
            say(buses[1], range(5))
            error = await ended(task)
        assert isinstance(error, BusError)
        assert "rank 0 is closed" in str(error)
    assert heard.farewells == numbered([0])


async def test_a_handler_may_send(open_buses: OpenBuses) -> None:
    """An answer for each message, to and fro, a hundred times."""
    async with open_buses(2) as buses:
        heard = (Heard(), Heard())

        def answering(rank: int) -> Callable[[int, Message], None]:
            def answer(source: int, message: Message) -> None:
                heard[rank](source, message)
                if message.steps < 100:
                    say(buses[rank], [message.steps + 1], to=source)

            return answer

        async with delivering(buses[0], answering(0)), delivering(buses[1], answering(1)):
            say(buses[1], [0])
            await heard[0].until(51)
    assert heard[0].farewells == numbered(range(0, 101, 2), source=1)
    assert heard[1].farewells == numbered(range(1, 101, 2), source=0)


@pytest.mark.parametrize(("sequence", "fault"), [(2, "lost"), (0, "repeated")])
async def test_a_gap_or_a_repeat_ends_a_delivery(
    open_buses: OpenBuses, sequence: int, fault: str
) -> None:
    """As it ends a read: both ranks named, and the handler does not get the message."""
    async with open_buses(2) as buses:
        heard = Heard()
        async with delivering(buses[1], heard) as task:
            say(buses[0], [0], to=1)
            await heard.until(1)
            buses.put_frame(1, encode(Envelope(0, sequence, Farewell(9))))
            error = await ended(task)
        assert isinstance(error, BusError)
        assert f"from rank 0 to rank 1 were {fault}" in str(error)
    assert heard.farewells == numbered([0], source=0)


async def test_a_malformed_frame_does_not_reach_the_handler(open_buses: OpenBuses) -> None:
    """It is counted and dropped, and the next message is heard."""
    async with open_buses(2) as buses:
        heard = Heard()
        async with delivering(buses[1], heard) as task:
            buses.put_frame(1, b"\x91" * 1000 + b"\x00")
            say(buses[0], [1], to=1)
            await heard.until(1)
            assert not task.done()
        assert buses[1].statistics().dropped == 1
    assert heard.farewells == numbered([1], source=0)

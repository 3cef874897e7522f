"""Messages that come back to back, before the rank has had a turn to act on the first."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

import rrfp_async as r
from rrfp_async.agreed import agreed_settings
from rrfp_async.bus.base import Bus
from rrfp_async.bus.codec import decode, encode
from rrfp_async.bus.inproc import InprocHub
from rrfp_async.bus.messages import (
    Envelope,
    Failure,
    Farewell,
    Hello,
    StepBegin,
    StepEnd,
)
from rrfp_async.session import Session


@dataclass
class Second:
    """Rank 1 of 2, whose first step has begun and whose tasks are done."""

    session: Session
    end: "asyncio.Task[float | None]"


def session_of(bus: Bus) -> Session:
    """Rank 1 of 2."""
    return Session(
        bus=bus,
        rank=1,
        topology=r.Topology(2),
        settings=(),
        clock=time.perf_counter,
        stall_timeout_s=60.0,
    )


@pytest.fixture
async def second() -> AsyncIterator[Second]:
    """A session that waits for the end of step 0."""
    bus = InprocHub(2).open(1)
    session = session_of(bus)
    session.open_step(training=True, update=True)
    begin = asyncio.create_task(session.begin(None, 0))
    await asyncio.sleep(0)
    session.handle(0, StepBegin(0, training=True, update=True, seed=0, sizes=(1,)))
    assert (await begin).sizes == (1,)
    end = asyncio.create_task(session.end(0.5))
    await asyncio.sleep(0)
    yield Second(session, end)
    end.cancel()
    await asyncio.gather(end, return_exceptions=True)
    bus.close()


async def test_a_step_ends_with_the_loss_that_the_first_rank_tells(second: Second) -> None:
    """StepEnd settles the step."""
    second.session.handle(0, StepEnd(0, 0.5))
    assert await second.end == (0.5, None)
    assert second.session.steps_done == 1


async def test_a_farewell_right_behind_the_step_s_end_is_not_forgotten(second: Second) -> None:
    """Who leaves after step 0 fails step 1, even if both messages are read in one turn."""
    second.session.handle(0, StepEnd(0, 0.5))
    try:
        second.session.handle(0, Farewell(1))
    except r.StepFailed:
        pytest.fail("the farewell undid a step that succeeded everywhere")
    assert await second.end == (0.5, None)
    second.session.open_step(training=True, update=True)
    with pytest.raises(r.StepFailed, match=r"rank 0.*closed its Runtime with 1 steps done"):
        async with asyncio.timeout(5.0):
            await second.session.begin(None, 0)


async def test_a_failure_of_the_next_step_leaves_this_one_whole(second: Second) -> None:
    """A step that returned on one rank has succeeded on all, whatever the next one brings."""
    second.session.handle(0, StepEnd(0, 0.5))
    second.session.handle(0, Failure(1, 0, None, None, None, "ValueError: bad batch"))
    assert await second.end == (0.5, None)


async def test_messages_of_the_next_step_are_early(second: Second) -> None:
    """What belongs to a step not opened yet is kept; to a past one, a fault."""
    assert second.session.is_early(StepBegin(1, training=True, update=True, seed=0, sizes=(1,)))
    second.session.handle(0, StepEnd(0, 0.5))
    await second.end
    assert second.session.is_early(StepBegin(1, training=True, update=True, seed=0, sizes=(1,)))
    second.session.open_step(training=True, update=True)
    assert not second.session.is_early(StepBegin(1, training=True, update=True, seed=0, sizes=(1,)))
    with pytest.raises(r.ProtocolError, match="came in step 1"):
        second.session.is_early(StepEnd(0, 0.5))


async def test_an_announcement_that_comes_twice_is_a_fault(second: Second) -> None:
    """A second StepBegin of the same step names itself."""
    with pytest.raises(r.ProtocolError, match=r"StepBegin.* came twice"):
        second.session.handle(0, StepBegin(0, training=True, update=True, seed=0, sizes=(1,)))


async def test_an_announcement_after_a_cancelled_begin_is_no_fault() -> None:
    """A step cancelled while it waits may still be announced: that is nobody's error."""
    bus = InprocHub(2).open(1)
    session = session_of(bus)
    session.open_step(training=True, update=True)
    begin = asyncio.create_task(session.begin(None, 0))
    await asyncio.sleep(0)
    begin.cancel()
    await asyncio.gather(begin, return_exceptions=True)
    bus.close()
    session.handle(0, StepBegin(0, training=True, update=True, seed=0, sizes=(1,)))


def _over_the_wire(settings: tuple[tuple[str, str], ...]) -> object:
    return decode(encode(Envelope(0, 0, Hello(settings)))).message.settings


def test_the_settings_of_a_small_world_arrive_whole() -> None:
    """What a rank compares is what its peer sent."""
    settings = agreed_settings(r.Config(microbatches=1), r.Topology(16))
    assert _over_the_wire(settings) == settings


def test_the_settings_of_thousands_of_ranks_arrive_whole() -> None:
    """A chain of 2,000 stages greets with equal settings, not with a text cut short."""
    settings = agreed_settings(r.Config(microbatches=1), r.Topology(2000))
    assert _over_the_wire(settings) == settings

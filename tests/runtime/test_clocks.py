"""How far a rank's clock is found to be from the first rank's."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rrfp_async as r
from rrfp_async.bus.inproc import InprocBus, InprocHub
from rrfp_async.clocks import ROUND_TRIPS, Alignment, ClockProbe
from rrfp_async.session import Session


class Wire:
    """A first rank whose clock is `ahead_s` of ours, behind a wire of given delays each way."""

    def __init__(self, ahead_s: float, delays_s: Sequence[tuple[float, float]]) -> None:
        self.now_s = 1000.0
        self.asked: list[int] = []
        self._ahead_s = ahead_s
        self._delays_s = delays_s
        self.probe = ClockProbe(lambda: self.now_s, self._ask)

    def _ask(self, number: int) -> None:
        there_s, back_s = self._delays_s[number]
        self.asked.append(number)
        self.now_s += there_s
        told_s = self.now_s + self._ahead_s
        self.now_s += back_s
        self.probe.told(number, told_s)


def measured(wire: Wire) -> Alignment:
    return asyncio.run(wire.probe.measure())


delays = st.floats(0.0, 1.0)


@given(
    st.floats(-1e6, 1e6),
    st.lists(st.tuples(delays, delays), min_size=ROUND_TRIPS, max_size=ROUND_TRIPS),
)
def test_the_offset_is_right_within_its_error(
    ahead_s: float, delays_s: list[tuple[float, float]]
) -> None:
    """Whatever the delays: half the quickest round trip bounds how far off it is."""
    aligned = measured(Wire(ahead_s, delays_s))
    rounding_s = 1e-8
    assert abs(aligned.offset_s - ahead_s) <= aligned.error_s + rounding_s
    assert aligned.error_s == pytest.approx(min(map(sum, delays_s)) / 2.0, abs=rounding_s)


def test_of_several_answers_the_quickest_counts() -> None:
    """One even round trip among lopsided long ones gives the offset to the bit it is worth."""
    delays_s = [(0.5, 0.1)] * ROUND_TRIPS
    delays_s[5] = (0.001, 0.001)
    aligned = measured(Wire(7.0, delays_s))
    assert aligned.offset_s == pytest.approx(7.0, abs=1e-9)
    assert aligned.error_s == pytest.approx(0.001)


def test_every_question_is_asked_once_in_turn() -> None:
    """None before the one before it is answered."""
    wire = Wire(0.0, [(0.1, 0.1)] * ROUND_TRIPS)
    measured(wire)
    assert wire.asked == list(range(ROUND_TRIPS))


async def test_an_answer_to_another_question_is_ignored() -> None:
    """Late ones would be taken for quick ones of the wrong time."""
    asked: list[int] = []
    probe = ClockProbe(lambda: 0.0, asked.append)
    measuring = asyncio.create_task(probe.measure())
    await asyncio.sleep(0)
    probe.told(7, 99.0)
    await asyncio.sleep(0)
    assert asked == [0]
    for number in range(ROUND_TRIPS):
        probe.told(number, 5.0)
        probe.told(number, 6.0)  # twice is no error
        await asyncio.sleep(0)
    assert (await measuring).offset_s == 5.0
    probe.told(0, 99.0)  # nobody waits any more


def _session(hub: InprocHub, rank: int, clock: Callable[[], float]) -> tuple[Session, InprocBus]:
    bus = hub.open(rank)
    session = Session(
        bus=bus,
        rank=rank,
        topology=r.Topology(2),
        settings=(),
        clock=clock,
        stall_timeout_s=60.0,
    )
    return session, bus


async def test_a_session_asks_the_first_rank_over_the_bus() -> None:
    """Rank 0's clock is 100 s ahead of rank 1's, which finds out, in a step or not."""
    hub, loop = InprocHub(2), asyncio.get_running_loop()
    first, first_bus = _session(hub, 0, lambda: loop.time() + 100.0)
    second, second_bus = _session(hub, 1, loop.time)
    reading = [
        asyncio.create_task(bus.deliver(session.handle))
        for session, bus in ((first, first_bus), (second, second_bus))
    ]
    aligned = await asyncio.wait_for(second.align_clocks(), 5.0)
    assert abs(aligned.offset_s - 100.0) <= aligned.error_s + 1e-6
    assert 0.0 <= aligned.error_s < 1.0
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    first_bus.close()
    second_bus.close()

"""The bus of the virtual cluster on which agreement messages take a while."""

import asyncio

import pytest

from rrfp_async.bus.inproc import InprocHub
from rrfp_async.bus.messages import ClockAsk, Message, TpProposal
from rrfp_async.errors import BusError
from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.sim.delayed_bus import DelayedBus
from tests.sim.guarded import clock, play


def proposal(number: int) -> TpProposal:
    return TpProposal(0, number, TaskId(0, TaskKind.F, number), 0.0)


async def received(bus: DelayedBus, number: int) -> list[tuple[float, Message]]:
    """The next messages, each with when it came."""
    found = []
    for _ in range(number):
        _, message = await bus.next_message()
        found.append((clock().time(), message))
    return found


def test_agreement_messages_come_late_and_in_order_and_others_at_once() -> None:
    """Sixty of one instant keep their order; what is no agreement overtakes them all."""

    async def main() -> None:
        hub = InprocHub(2)
        here, there = (DelayedBus(hub.open(rank), 0.25) for rank in range(2))
        await asyncio.sleep(1.0)
        for number in range(60):
            here.send_nowait(1, proposal(number))
        here.send_nowait(1, ClockAsk(7))
        assert await received(there, 61) == [
            (1.0, ClockAsk(7)),
            *[(1.25, proposal(number)) for number in range(60)],
        ]
        here.send_nowait(1, proposal(60))
        await asyncio.sleep(0.125)
        here.send_nowait(1, proposal(61))
        assert await received(there, 2) == [(1.5, proposal(60)), (1.625, proposal(61))]
        assert (here.statistics().sent, there.statistics().received) == (63, 63)

    play(main())


def test_closing_drops_what_is_under_way(caplog: pytest.LogCaptureFixture) -> None:
    """Twice is harmless; the other end hears nothing more, this one is refused, no timer fails."""

    async def main() -> None:
        hub = InprocHub(2)
        here, there = (DelayedBus(hub.open(rank), 0.25) for rank in range(2))
        assert (here.rank, there.rank) == (0, 1)
        here.send_nowait(1, proposal(0))
        here.close()
        here.close()
        await asyncio.sleep(1.0)
        assert there.statistics().pending == 0
        with pytest.raises(BusError, match="closed"):
            here.send_nowait(1, ClockAsk(0))

    play(main())
    assert caplog.messages == []

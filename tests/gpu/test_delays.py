"""Seeded delays: a function of the seed and the thing, and of nothing else."""

import asyncio
import time

import pytest
import torch

from rrfp_async.gpu.delays import DelayedDevice, DelayedTransfer, Delays
from rrfp_async.gpu.device import CpuDevice
from rrfp_async.gpu.loopback import LoopbackFabric
from rrfp_async.gpu.transfer import spec_of
from rrfp_async.ids import Link, TaskId

LINK = Link(0, 1)


def test_the_same_thing_gets_the_same_delay_for_one_seed() -> None:
    """Whatever was drawn before or in which order."""
    things = [("send", LINK, number) for number in range(20)]
    forward = {thing: Delays(3).draw(1.0, *thing) for thing in things}
    delays = Delays(3)
    backward = {thing: delays.draw(1.0, *thing) for thing in reversed(things)}
    assert forward == backward


def test_seeds_and_things_give_different_delays_within_the_bound() -> None:
    """20 seeds, 20 things: 400 delays, all between nothing and the maximum."""
    drawn = [
        Delays(seed).draw(0.01, "send", LINK, number) for seed in range(20) for number in range(20)
    ]
    assert len(set(drawn)) == 400
    assert 0.0 <= min(drawn) < 0.001
    assert 0.009 < max(drawn) <= 0.01


async def test_sends_are_delayed_and_otherwise_pass() -> None:
    """What is sent arrives; the send takes at least its delay."""
    fabric, delays = LoopbackFabric(), Delays(1, send_most_s=0.02)
    sender, receiver = DelayedTransfer(fabric.open(), delays), fabric.open()
    tensor = sender.export(torch.ones(3))
    begun = time.perf_counter()
    _, [received] = await asyncio.gather(
        sender.send(LINK, 0, [tensor]), receiver.receive(LINK, 0, [spec_of(tensor)])
    )
    took_s = time.perf_counter() - begun
    assert torch.equal(received, tensor)
    assert took_s >= delays.draw(0.02, "send", LINK, 0) - 0.002
    assert sender.statistics().completed == 1


async def test_delays_let_later_sends_overtake() -> None:
    """Numbers on one link arrive in another order than they were sent in."""
    fabric = LoopbackFabric()
    sender = DelayedTransfer(fabric.open(), Delays(2, send_most_s=0.02))
    receiver, tensor = fabric.open(), torch.ones(1)
    order: list[int] = []

    async def receive(number: int) -> None:
        await receiver.receive(LINK, number, [spec_of(tensor)])
        order.append(number)

    sends = (sender.send(LINK, number, [tensor]) for number in range(8))
    await asyncio.gather(*sends, *map(receive, range(8)))
    assert sorted(order) == list(range(8))
    assert order != list(range(8))


async def test_a_cancelled_delay_sends_nothing() -> None:
    """Cancelled while it waits, a send has not begun."""
    fabric = LoopbackFabric()
    sender = DelayedTransfer(fabric.open(), Delays(2, send_most_s=60.0))
    task = asyncio.create_task(sender.send(LINK, 0, [torch.ones(1)]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fabric.open_meetings == 0


async def test_tasks_are_delayed_on_the_device_and_other_work_is_not() -> None:
    """The delay holds the device: it counts as computation, from the first run to the next anew."""
    inner = CpuDevice(time.perf_counter)
    device = DelayedDevice(inner, Delays(1, task_most_s=0.02))
    task = TaskId.parse("0F0")
    first, second = [await device.run(lambda: 1, task=task) for _ in range(2)]
    plain = await device.run(lambda: 2)
    for number, computed in enumerate((first, second), start=1):
        wanted = Delays(1).draw(0.02, "task", task, number)
        assert computed.finished_s - computed.started_s >= wanted
    assert (first.value, plain.value) == (1, 2)
    assert device.torch_device == inner.torch_device
    device.close()

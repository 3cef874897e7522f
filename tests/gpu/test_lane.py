"""A device as one Runtime uses it: the next task is given while one runs, and may be taken back."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from rrfp_async.errors import StateError
from rrfp_async.gpu import delays as delays_module
from rrfp_async.gpu.completion import Computed
from rrfp_async.gpu.delays import DelayedDevice, Delays
from rrfp_async.gpu.device import CpuDevice, Device
from rrfp_async.ids import TaskId

SOON_S = 2.0
FIRST, SECOND, THIRD = (TaskId.parse(f"0F{number}") for number in range(3))


class Shop:
    """A device with a lane, and functions that note when they run; the first waits to be let go."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.lane = device.lane()
        self.ran: list[TaskId] = []
        self._begun = threading.Event()
        self._let_go = threading.Event()

    async def hold(self, lane: Device, error: Exception | None = None) -> "asyncio.Task[object]":
        """Give the first task, which now runs."""

        def run() -> None:
            self.ran.append(FIRST)
            self._begun.set()
            assert self._let_go.wait(5.0)
            if error is not None:
                raise error

        running = asyncio.create_task(lane.run(run, task=FIRST))
        async with asyncio.timeout(SOON_S):
            while not self._begun.is_set():  # noqa: ASYNC110 - another thread is watched
                await asyncio.sleep(0.001)
        return running

    async def give(self, lane: Device, task: TaskId) -> "asyncio.Task[Computed[None]]":
        """Give a task behind it."""
        given = asyncio.create_task(lane.run(lambda: self.ran.append(task), task=task))
        await asyncio.sleep(0)
        return given

    def let_go(self) -> None:
        self._let_go.set()

    async def drained(self) -> None:
        """Until all that was given has run or was passed over."""
        async with asyncio.timeout(SOON_S):
            await self.device.run(lambda: None)


def _plain() -> Device:
    return CpuDevice(time.perf_counter, name="rrfp-lane-test")


def _delayed() -> Device:
    return DelayedDevice(_plain(), Delays(1, task_most_s=0.001))


@pytest.fixture(params=[_plain, _delayed], ids=["plain", "delayed"])
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    """Of a plain device and of a delayed one, whose threads end."""
    make: Callable[[], Device] = request.param
    shop = Shop(make())
    yield shop
    shop.let_go()
    shop.device.close()
    for thread in threading.enumerate():
        if thread.name == "rrfp-lane-test":
            thread.join(1.0)
            assert not thread.is_alive()


async def _gone(task: "asyncio.Task[Computed[None]]") -> None:
    """Cancel a task, as whoever takes back what it awaits must."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_lane_takes_back_and_its_device_does_not(shop: Shop) -> None:
    """They are one place: the same thread, the same tensors."""
    assert shop.lane.takes_back
    assert not shop.device.takes_back
    assert not shop.device.withdraw(FIRST)
    assert shop.lane.torch_device == shop.device.torch_device == torch.device("cpu")
    names = {(await way.run(threading.current_thread)).value for way in (shop.lane, shop.device)}
    assert len(names) == 1


async def test_a_task_that_was_taken_back_does_not_run(shop: Shop) -> None:
    """Another takes its place; its caller is told nothing."""
    running = await shop.hold(shop.lane)
    taken_back = await shop.give(shop.lane, SECOND)
    assert shop.lane.withdraw(SECOND)
    await _gone(taken_back)
    instead = await shop.give(shop.lane, THIRD)
    shop.let_go()
    await asyncio.gather(running, instead)
    assert shop.ran == [FIRST, THIRD]


async def test_a_task_that_was_taken_back_may_be_given_again(shop: Shop) -> None:
    """Behind the one that took its place; each runs once."""
    running = await shop.hold(shop.lane)
    taken_back = await shop.give(shop.lane, SECOND)
    assert shop.lane.withdraw(SECOND)
    await _gone(taken_back)
    given = [await shop.give(shop.lane, task) for task in (THIRD, SECOND)]
    shop.let_go()
    await asyncio.gather(running, *given)
    assert shop.ran == [FIRST, THIRD, SECOND]


async def test_a_task_that_runs_cannot_be_taken_back(shop: Shop) -> None:
    """It ends, and so does what was given behind it."""
    running = await shop.hold(shop.lane)
    behind = await shop.give(shop.lane, SECOND)
    assert not shop.lane.withdraw(FIRST)
    shop.let_go()
    await asyncio.gather(running, behind)
    assert shop.ran == [FIRST, SECOND]


async def test_a_task_whose_end_was_not_heard_cannot_be_taken_back(shop: Shop) -> None:
    """The thread is done with it, the loop has not been told yet."""
    running = await shop.hold(shop.lane)
    behind = await shop.give(shop.lane, SECOND)
    shop.let_go()
    deadline = time.monotonic() + SOON_S
    while SECOND not in shop.ran and time.monotonic() < deadline:
        time.sleep(0.001)  # noqa: ASYNC251 - the loop must not hear of it
    assert not shop.lane.withdraw(SECOND)
    await asyncio.gather(running, behind)


async def test_a_task_that_was_never_given_is_taken_back(shop: Shop) -> None:
    """It will not run."""
    assert shop.lane.withdraw(SECOND)
    running = await shop.hold(shop.lane)
    assert shop.lane.withdraw(SECOND)
    shop.let_go()
    await running


async def test_a_task_behind_one_that_fails_is_not_run(shop: Shop) -> None:
    """Its caller is cancelled; the lane goes on."""
    running = await shop.hold(shop.lane, ArithmeticError("no"))
    behind = await shop.give(shop.lane, SECOND)
    shop.let_go()
    ends = await asyncio.gather(running, behind, return_exceptions=True)
    assert [type(end) for end in ends] == [ArithmeticError, asyncio.CancelledError]
    await shop.give(shop.lane, THIRD)
    await shop.drained()
    assert shop.ran == [FIRST, THIRD]


async def test_another_lane_of_the_device_has_tasks_of_its_own(shop: Shop) -> None:
    """It neither takes back this one's nor falls with them, though they share a thread."""
    other = shop.device.lane()
    running = await shop.hold(shop.lane, ArithmeticError("no"))
    theirs = await shop.give(other, SECOND)
    ours = await shop.give(shop.lane, SECOND)
    assert shop.lane.withdraw(SECOND)
    await _gone(ours)
    shop.let_go()
    ends = await asyncio.gather(running, theirs, return_exceptions=True)
    assert isinstance(ends[0], ArithmeticError)
    assert isinstance(ends[1], Computed)
    assert shop.ran == [FIRST, SECOND]


async def test_work_between_tasks_runs_whatever_failed_before_it(shop: Shop) -> None:
    """Such as the optimizer, or reading a loss."""
    running = await shop.hold(shop.lane, ArithmeticError("no"))
    between = asyncio.create_task(shop.lane.run(lambda: 7))
    await asyncio.sleep(0)
    shop.let_go()
    ends = await asyncio.gather(running, between, return_exceptions=True)
    assert isinstance(ends[0], ArithmeticError)
    assert ends[1].value == 7


async def test_closing_a_lane_leaves_the_device_open(shop: Shop) -> None:
    """The thread is the device's; once that is closed, no lane takes work."""
    shop.lane.close()
    assert (await shop.lane.run(lambda: 1)).value == 1
    shop.device.close()
    for way in (shop.lane, shop.device, shop.device.lane()):
        with pytest.raises(StateError, match="closed: open a new world"):
            await way.run(lambda: 1)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays of a delayed device, which are noted and not waited."""
    slept: list[float] = []
    monkeypatch.setattr(delays_module, "time", SimpleNamespace(sleep=slept.append))
    return slept


def _draws(task: TaskId, *times: int) -> list[float]:
    return [Delays(1).draw(Delays(1).task_most_s, "task", task, number) for number in times]


async def test_lanes_share_the_counts_of_delays(slept: list[float]) -> None:
    """A task's second run has another delay than its first, whichever lane it is given to."""
    shop = Shop(DelayedDevice(_plain(), Delays(1)))
    for lane in (shop.lane, shop.device.lane(), shop.device):
        await (await shop.give(lane, FIRST))
    assert slept == _draws(FIRST, 1, 2, 3)
    shop.device.close()


async def test_a_delay_is_not_used_up_by_a_task_taken_back(slept: list[float]) -> None:
    """It is drawn when the task runs."""
    shop = Shop(DelayedDevice(_plain(), Delays(1)))
    running = await shop.hold(shop.lane)
    taken_back = await shop.give(shop.lane, SECOND)
    assert shop.lane.withdraw(SECOND)
    await _gone(taken_back)
    shop.let_go()
    await running
    await (await shop.give(shop.lane, SECOND))
    assert slept == _draws(FIRST, 1) + _draws(SECOND, 1)
    shop.device.close()

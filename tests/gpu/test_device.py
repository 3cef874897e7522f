"""The CPU device: one thread, one function at a time, errors brought back."""

import asyncio
import gc
import itertools
import threading
import time
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch

from rrfp_async.errors import StateError
from rrfp_async.gpu.ambient import Ambient
from rrfp_async.gpu.device import CpuDevice
from tests.machine import took


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    """A device whose thread is gone within a second after it was closed."""
    device = CpuDevice(time.perf_counter, name="rrfp-compute-test")
    yield device
    device.close()
    for thread in threading.enumerate():
        if thread.name == "rrfp-compute-test":
            thread.join(1.0)
            assert not thread.is_alive()


async def test_functions_run_on_one_thread_of_the_device_s_own(device: CpuDevice) -> None:
    """Not the loop's thread, and the same one each time."""
    names = {(await device.run(lambda: threading.current_thread().name)).value for _ in range(3)}
    assert names == {"rrfp-compute-test"}
    assert device.torch_device == torch.device("cpu")


async def test_functions_run_one_at_a_time_in_order(device: CpuDevice) -> None:
    """Started at once, they neither overlap nor overtake."""
    log: list[tuple[str, int]] = []

    def work(number: int) -> None:
        log.append(("begin", number))
        time.sleep(0.001)
        log.append(("end", number))

    spans = await asyncio.gather(*(device.run(lambda n=n: work(n)) for n in range(10)))
    assert log == [(word, n) for n in range(10) for word in ("begin", "end")]
    for before, after in itertools.pairwise(spans):
        assert before.started_s <= before.finished_s <= after.started_s


async def test_the_loop_is_free_while_a_function_runs(device: CpuDevice) -> None:
    """A blocking function blocks its thread only."""
    let_go = threading.Event()
    running = asyncio.create_task(device.run(lambda: let_go.wait(5.0)))
    await asyncio.sleep(0)
    let_go.set()
    assert (await running).value is True


async def test_what_a_function_raises_is_raised_here(device: CpuDevice) -> None:
    """The exception itself; the device goes on."""
    error = ArithmeticError("no")

    def fail() -> None:
        raise error

    with pytest.raises(ArithmeticError) as told:
        await device.run(fail)
    assert told.value is error
    assert (await device.run(lambda: 1)).value == 1


@pytest.mark.parametrize("kind", [StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_exceptions_that_no_future_takes_come_wrapped(
    device: CpuDevice, kind: type[BaseException]
) -> None:
    """What would end the loop, or cannot be set on a future, is a RuntimeError with its cause."""

    def fail() -> None:
        raise kind("odd")

    with pytest.raises(RuntimeError, match=f"{kind.__name__} left a computation: odd") as told:
        await device.run(fail)
    assert isinstance(told.value.__cause__, kind)
    assert (await device.run(lambda: 1)).value == 1


async def test_cancelling_stops_the_waiting_not_the_function(device: CpuDevice) -> None:
    """The function runs to its end, its result is dropped, the next one runs after it."""
    let_go, ended = threading.Event(), threading.Event()

    def work() -> None:
        let_go.wait(5.0)
        ended.set()

    running = asyncio.create_task(device.run(work))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not ended.is_set()
    let_go.set()
    assert (await device.run(ended.is_set)).value is True


async def test_a_closed_device_takes_no_work(device: CpuDevice) -> None:
    """StateError says what to do; closing twice is harmless."""
    device.close()
    device.close()
    with pytest.raises(StateError, match="closed: open a new world"):
        await device.run(lambda: 1)


async def test_closing_waits_for_nothing(device: CpuDevice) -> None:
    """close() returns at once under a running function, which still ends."""
    let_go = threading.Event()
    running = asyncio.create_task(device.run(lambda: let_go.wait(5.0)))
    await asyncio.sleep(0)
    with took() as closing:
        device.close()
    assert closing.own_s < 0.1
    let_go.set()
    assert (await running).value is True


def _nothing() -> None:
    """What a device does between tasks."""


async def test_a_function_s_tensors_go_with_it(device: CpuDevice) -> None:
    """Nothing of a finished function lives until the next one."""
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    await device.run(lambda tensor=tensor: tensor.sum())
    del tensor
    assert (await device.run(_nothing)).value is None  # the thread has left the last frame
    assert gone() is None


def test_a_result_for_a_loop_that_has_closed_is_dropped(device: CpuDevice) -> None:
    """A function that outlives its loop harms nobody, and the device still works."""
    let_go = threading.Event()

    async def leave() -> None:
        task = asyncio.create_task(device.run(lambda: let_go.wait(5.0)))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave())
    let_go.set()

    async def use() -> int:
        return (await device.run(lambda: 2)).value

    assert asyncio.run(use()) == 2


async def test_a_thread_adopts_its_caller_s_thread_count(device: CpuDevice) -> None:
    """A thread keeps the intra-op count it began with, until it is told another."""
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            await device.run(lambda: Ambient(torch.get_num_threads()).adopt_num_threads())
            await device.run(Ambient(count).adopt_num_threads)
            assert (await device.run(torch.get_num_threads)).value == count
    finally:
        torch.set_num_threads(before)


def test_a_device_that_is_dropped_warns_and_ends_its_thread() -> None:
    """Leaking warns, and the thread does not stay."""
    device = CpuDevice(time.perf_counter, name="rrfp-compute-leaked")
    thread = device._thread._service.thread
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        keep = weakref.ref(device)
        del device
        gc.collect()
    thread_alive = thread.is_alive()
    if keep() is not None:
        keep().close()
    assert [warning.category for warning in told] == [ResourceWarning]
    assert keep() is None
    assert not thread_alive or thread.join(1.0) is None

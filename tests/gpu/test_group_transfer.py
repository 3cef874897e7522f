"""Transfers over gloo: two ranks in this process, a process group per directed link."""

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rrfp_async.errors import TransferError
from rrfp_async.gpu.group_transfer import PACKED_MOST_BYTES, GroupTransfer
from rrfp_async.gpu.links import open_links
from rrfp_async.gpu.transfer import TransferStatistics, spec_of
from rrfp_async.ids import Link, TensorSpec
from tests.machine import Ticker, took

REPOSITORY = Path(__file__).parents[2]
THERE, BACK = Link(0, 1), Link(1, 0)
LINKS = [THERE, BACK]
HOST = "127.0.0.1"
CPU = torch.device("cpu")
SOON_S = 5.0
NO_PAUSE_S = 0.2


def _connect(rank: int, store: Any, timeout_s: float) -> GroupTransfer:
    groups = open_links(LINKS, rank=rank, store=store, host=HOST, device=CPU, timeout_s=timeout_s)
    return GroupTransfer(groups, rank=rank, device=CPU, clock=time.perf_counter)


async def _connected(timeout_s: float = 10.0) -> list[GroupTransfer]:
    """Both ends, each made on a thread of its own: gloo blocks until the other is there."""
    store = dist.HashStore()
    return await asyncio.gather(
        *(asyncio.to_thread(_connect, rank, store, timeout_s) for rank in (0, 1))
    )


@pytest.fixture
async def ends() -> AsyncIterator[list[GroupTransfer]]:
    """The ends of ranks 0 and 1, on which nothing is open at the end."""
    opened = await _connected()
    yield opened
    for end in opened:
        statistics = end.statistics()
        assert (statistics.open_sends, statistics.open_receives) == (0, 0)
        end.close()


async def _pass(
    ends: list[GroupTransfer], number: int, tensors: list[Tensor], link: Link = THERE
) -> list[Tensor]:
    """One transfer from end to end."""
    exported = [ends[link.source].export(tensor) for tensor in tensors]
    specs = [spec_of(tensor) for tensor in exported]
    async with asyncio.timeout(SOON_S):
        _, received = await asyncio.gather(
            ends[link.source].send(link, number, exported),
            ends[link.target].receive(link, number, specs),
        )
    return received


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]
SHAPES = [(), (0,), (1,), (2, 0, 3), (4, 5, 6), (257,)]


@pytest.mark.parametrize("dtype", DTYPES)
async def test_any_tensor_arrives_as_it_was(ends: list[GroupTransfer], dtype: torch.dtype) -> None:
    """Shape, dtype and every bit, scalars and empty tensors included, one by one and together."""
    tensors = [torch.randn(shape).mul(10).to(dtype) for shape in SHAPES]
    for number, tensor in enumerate(tensors):
        [received] = await _pass(ends, number, [tensor])
        assert (received.dtype, received.shape) == (dtype, tensor.shape)
        assert torch.equal(received, tensor)
    together = await _pass(ends, len(tensors), tensors)
    assert all(torch.equal(*pair) for pair in zip(together, tensors, strict=True))


async def test_nan_and_negative_zero_keep_their_bits(ends: list[GroupTransfer]) -> None:
    """What is sent is bytes, not numbers."""
    tensor = torch.tensor([float("nan"), -0.0, float("inf"), 5e-324], dtype=torch.float64)
    [received] = await _pass(ends, 0, [tensor])
    assert torch.equal(received.view(torch.int64), tensor.view(torch.int64))


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda t: t.t(),
    "expand": lambda t: t[:1].expand(7, -1),
    "slice": lambda t: t[1::2, ::3],
    "offset": lambda t: t[1:],
    "diagonal": lambda t: t.diagonal(),
    "conjugate": lambda t: t.to(torch.complex64).mul(1j).conj(),
    "negative view": lambda t: t.to(torch.complex64).conj().imag,
}


@pytest.mark.parametrize("way", WAYS)
async def test_views_arrive_as_what_they_show(ends: list[GroupTransfer], way: str) -> None:
    """Exports of views, contiguous in memory or not, lazy conjugations and negations included."""
    view = WAYS[way](torch.randn(6, 9))
    exported = ends[0].export(view)
    assert exported.is_contiguous()
    assert not exported.requires_grad
    [received] = await _pass(ends, 0, [view])
    assert torch.equal(received, view)


async def test_a_large_contiguous_tensor_is_exported_without_a_copy(
    ends: list[GroupTransfer],
) -> None:
    """Its storage is the same, and its version counter, by which a change in place is seen."""
    tensor = torch.randn(PACKED_MOST_BYTES, requires_grad=True).mul(2)
    exported = ends[0].export(tensor)
    assert exported.data_ptr() == tensor.data_ptr()
    tensor.detach().add_(1)
    assert exported._version == tensor._version == 1


async def test_a_small_tensor_is_exported_as_a_copy(ends: list[GroupTransfer]) -> None:
    """Its task's successor may write to it before it is packed."""
    tensor = torch.ones(3)
    exported = ends[0].export(tensor)
    tensor.zero_()
    assert exported.tolist() == [1.0] * 3


async def test_received_tensors_start_on_64_bytes(ends: list[GroupTransfer]) -> None:
    """Whatever their size and however many come at once; and each has memory of its own."""
    tensors = [torch.randn(size)[1:] for size in (2, 3, 6, 18, 1001, 70_000)]
    received = await _pass(ends, 0, tensors)
    assert [tensor.data_ptr() % 64 for tensor in received] == [0] * 6
    assert len({tensor.untyped_storage().data_ptr() for tensor in received}) == 6


@pytest.mark.parametrize("seed", range(4))
async def test_numbers_say_the_order_whatever_is_awaited_first(
    ends: list[GroupTransfer], seed: int
) -> None:
    """Sends in reversed order, receives in a random one, of different sizes, both ways at once."""
    count = 12
    tensors = {
        (link, number): torch.full((1 + 700 * number,), float(number + 100 * link.source))
        for link in LINKS
        for number in range(count)
    }

    async def send(link: Link, number: int) -> None:
        await ends[link.source].send(link, number, [tensors[link, number]])

    async def receive(link: Link, number: int) -> None:
        tensor = tensors[link, number]
        [received] = await ends[link.target].receive(link, number, [spec_of(tensor)])
        assert torch.equal(received, tensor)

    receives = [(link, number) for link in LINKS for number in range(count)]
    random.Random(seed).shuffle(receives)
    sends = [(link, number) for link in LINKS for number in reversed(range(count))]
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(
            *(send(*which) for which in sends), *(receive(*which) for which in receives)
        )
    assert [end.statistics() for end in ends] == [TransferStatistics(0, 0, 2 * count)] * 2


async def test_a_later_number_waits_for_the_earlier(ends: list[GroupTransfer]) -> None:
    """Number 1 does not pass before number 0 was awaited, on either end."""
    ones, zeros = torch.ones(3), torch.zeros(3)
    late = asyncio.create_task(ends[0].send(THERE, 1, [ones]))
    taken = asyncio.create_task(ends[1].receive(THERE, 1, [spec_of(ones)]))
    await asyncio.sleep(0.05)
    assert not late.done()
    assert not taken.done()
    assert ends[0].statistics().open_sends == 1
    [first] = await _pass(ends, 0, [zeros])
    async with asyncio.timeout(SOON_S):
        await late
        [second] = await taken
    assert torch.equal(first, zeros)
    assert torch.equal(second, ones)


async def test_a_send_ends_when_the_receiver_has_the_tensors(ends: list[GroupTransfer]) -> None:
    """Rendezvous, small tensors too, and the loop runs meanwhile."""
    tensor = torch.ones(3)
    async with Ticker(tick_s=0.005) as ticker:
        sending = asyncio.create_task(ends[0].send(THERE, 0, [tensor]))
        await asyncio.sleep(0.1)
    assert not sending.done()
    [received] = await ends[1].receive(THERE, 0, [spec_of(tensor)])
    await sending
    assert torch.equal(received, tensor)
    assert max(ticker.gaps) < NO_PAUSE_S


async def test_a_large_send_leaves_the_loop_free(ends: list[GroupTransfer]) -> None:
    """64 MB posted and passed: no gap of a ticker as long as the transfer itself could make."""
    tensor = torch.arange(16_000_000, dtype=torch.float32)
    async with Ticker(tick_s=0.005) as ticker:
        [received] = await _pass(ends, 0, [tensor])
    assert torch.equal(received, tensor)
    assert max(ticker.gaps) < NO_PAUSE_S


async def test_links_do_not_wait_for_one_another(ends: list[GroupTransfer]) -> None:
    """One direction stuck on a receiver that does not come, the other passes."""
    stuck = asyncio.create_task(ends[0].send(THERE, 0, [torch.ones(1)]))
    for number in range(3):
        await _pass(ends, number, [torch.ones(2)], BACK)
    assert not stuck.done()
    await ends[1].receive(THERE, 0, [TensorSpec((1,), "float32")])
    await stuck


async def test_an_unknown_link_is_the_caller_s_error(ends: list[GroupTransfer]) -> None:
    """And nothing counts as open after it."""
    with pytest.raises((KeyError, ValueError)):
        await ends[0].send(Link(0, 2), 0, [torch.ones(1)])


PEER = """
import sys, time, torch, torch.distributed as dist
from datetime import timedelta
from rrfp_async.gpu.links import open_links
from rrfp_async.ids import Link
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=20))
links = open_links([Link(0, 1), Link(1, 0)], rank=1, store=store, host="127.0.0.1",
                   device=torch.device("cpu"), timeout_s=20)
time.sleep(60)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python processes that end with the test."""
    started = []

    def start(program: str, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.multiprocess
async def test_a_peer_that_vanishes_cuts_off_what_waits_for_it(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    """SIGKILL: a receive and a send that wait raise TransferError naming number and link."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    peer = start(PEER, str(store.port))
    end = await asyncio.to_thread(_connect, 0, store, 20.0)
    spec = TensorSpec((3,), "float32")
    waiting = [
        asyncio.create_task(end.receive(BACK, 0, [spec])),
        asyncio.create_task(end.send(THERE, 0, [torch.ones(3)])),
    ]
    await asyncio.sleep(0.1)
    peer.kill()
    async with asyncio.timeout(SOON_S):
        [receive, send] = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(receive, TransferError)
    assert "number 0 on link 1=>0 was cut off" in str(receive)
    assert isinstance(send, TransferError)
    assert "number 0 on link 0=>1 was cut off" in str(send)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(TransferError, match="number 1 on link 1=>0 was cut off"):
            await end.receive(BACK, 1, [spec])
        with pytest.raises(TransferError, match="number 1 on link 0=>1 was cut off"):
            await end.send(THERE, 1, [torch.ones(3)])
    assert end.statistics() == TransferStatistics(0, 0, 0)
    end.close()


async def test_a_link_whose_other_end_does_not_come_is_named_in_time() -> None:
    """Connecting alone ends with the link, the host and the timeout."""
    named = r"rank 0 cannot connect link 0=>1 from .* within 1"
    with took() as connecting, pytest.raises(TransferError, match=named):
        await asyncio.to_thread(_connect, 0, dist.HashStore(), 1.0)
    assert connecting.own_s < 3.0


async def test_a_host_that_is_not_this_one_is_named() -> None:
    """An address without an interface here is told with the link."""
    with pytest.raises(TransferError, match=r"rank 0 cannot connect link 0=>1 from 192\.0\.2\.7"):
        await asyncio.to_thread(
            open_links,
            LINKS,
            rank=0,
            store=dist.HashStore(),
            host="192.0.2.7",
            device=CPU,
            timeout_s=1.0,
        )


async def test_closing_frees_whatever_waits_for_a_peer() -> None:
    """An open receive and send end with an error, at once; the links' threads are gone."""
    opened = await _connected()
    waiting = [
        asyncio.create_task(opened[0].receive(BACK, 0, [TensorSpec((3,), "float32")])),
        asyncio.create_task(opened[0].send(THERE, 0, [torch.ones(3)])),
    ]
    behind = asyncio.create_task(opened[0].send(THERE, 7, [torch.ones(3)]))
    await asyncio.sleep(0.05)
    with took() as closing:
        for end in (*opened, *opened):
            end.close()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert closing.own_s < NO_PAUSE_S
    assert [type(outcome) for outcome in outcomes] == [TransferError, TransferError]
    behind.cancel()
    await asyncio.gather(behind, return_exceptions=True)
    assert opened[0].statistics() == TransferStatistics(0, 0, 0)
    assert [t.name for t in threading.enumerate() if t.name.startswith("rrfp-link")] == []


LEAVING = """
import asyncio, torch
from tests.gpu.test_group_transfer import BACK, THERE, _connected
from rrfp_async.ids import TensorSpec
async def main():
    ends = await _connected()
    waiting = [asyncio.create_task(ends[0].receive(BACK, 0, [TensorSpec((3,), "float32")])),
               asyncio.create_task(ends[0].send(THERE, 0, [torch.ones(3)]))]
    await asyncio.sleep(0.1)
    print("leaving", flush=True)
asyncio.run(main())
"""


@pytest.mark.multiprocess
def test_a_process_leaves_though_transfers_wait_and_nobody_closed(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    """Threads that wait on gloo keep no process alive, and it ends with status 0."""
    process = start(LEAVING)
    assert process.stdout is not None
    assert process.stdout.readline() == "leaving\n"
    told, _ = process.communicate(timeout=5.0)
    assert process.returncode == 0, told

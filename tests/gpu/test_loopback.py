"""Transfers in one process: copies, rendezvous, and what does not match."""

import asyncio
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from rrfp_async.errors import TransferError
from rrfp_async.gpu.loopback import LoopbackFabric, LoopbackTransfer
from rrfp_async.gpu.transfer import TransferStatistics, spec_of
from rrfp_async.ids import Link, TensorSpec

LINK = Link(0, 1)
SOON_S = 2.0


@pytest.fixture
def fabric() -> Iterator[LoopbackFabric]:
    """A fabric that ends without open meetings."""
    fabric = LoopbackFabric()
    yield fabric
    assert fabric.open_meetings == 0


@pytest.fixture
def ends(fabric: LoopbackFabric) -> Iterator[tuple[LoopbackTransfer, LoopbackTransfer]]:
    """The ends of ranks 0 and 1, on which nothing is open at the end."""
    ends = fabric.open(), fabric.open()
    yield ends
    for end in ends:
        statistics = end.statistics()
        assert (statistics.open_sends, statistics.open_receives) == (0, 0)


Ends = tuple[LoopbackTransfer, LoopbackTransfer]


async def _pass(ends: Ends, number: int, tensors: list[Tensor], link: Link = LINK) -> list[Tensor]:
    """One transfer from end to end."""
    specs = [spec_of(tensor) for tensor in tensors]
    exported = [ends[0].export(tensor) for tensor in tensors]
    async with asyncio.timeout(SOON_S):
        _, received = await asyncio.gather(
            ends[0].send(link, number, exported), ends[1].receive(link, number, specs)
        )
    return received


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5, 6)])
async def test_any_tensor_arrives_as_it_was(
    ends: Ends, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Shape, dtype and every value of tensors of any kind, scalars and empty ones included."""
    tensor = torch.randn(shape).mul(10).to(dtype)
    [received] = await _pass(ends, 0, [tensor])
    assert (received.dtype, received.shape) == (dtype, torch.Size(shape))
    assert torch.equal(received, tensor)


async def test_what_is_sent_is_copied(ends: Ends) -> None:
    """Changing the original after export changes nothing, and the copy is the receiver's own."""
    original = torch.ones(4, 4)
    exported = ends[0].export(original)
    original.zero_()
    spec = spec_of(exported)
    _, [received] = await asyncio.gather(
        ends[0].send(LINK, 0, [exported]), ends[1].receive(LINK, 0, [spec])
    )
    assert torch.equal(received, torch.ones(4, 4))
    assert received.untyped_storage().data_ptr() != original.untyped_storage().data_ptr()


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda t: t.t(),
    "expand": lambda t: t[:1].expand(8, -1),
    "strided": lambda t: t[:, ::2],
    "offset": lambda t: t.flatten()[1:],
    "channels last": lambda t: t.reshape(1, 2, 4, 8).to(memory_format=torch.channels_last),
    "with history": lambda t: t.requires_grad_() * 2,
}


@pytest.mark.parametrize("way", WAYS)
async def test_what_arrives_is_contiguous_detached_and_aligned(ends: Ends, way: str) -> None:
    """Whatever was sent: contiguous, without autograd history, on a 64-byte boundary."""
    tensor = WAYS[way](torch.randn(8, 8))
    [received] = await _pass(ends, 0, [tensor])
    assert received.is_contiguous()
    assert received.grad_fn is None
    assert not received.requires_grad
    assert received.data_ptr() % 64 == 0
    assert torch.equal(received, tensor.detach())


@pytest.mark.parametrize("seed", range(3))
async def test_every_tensor_starts_on_a_64_byte_boundary(ends: Ends, seed: int) -> None:
    """Odd sizes, many at once: each aligned on its own."""
    rng = random.Random(seed)
    for number in range(50):
        sizes = [rng.randrange(1, 5000) for _ in range(3)]
        received = await _pass(ends, number, [torch.ones(n, dtype=torch.uint8) for n in sizes])
        assert [tensor.data_ptr() % 64 for tensor in received] == [0, 0, 0]


async def test_a_send_ends_when_the_receiver_has_it(ends: Ends) -> None:
    """Rendezvous: an offered tensor stays open until it is taken, at any size."""
    tensor = torch.ones(1)
    send = asyncio.create_task(ends[0].send(LINK, 0, [tensor]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not send.done()
    assert ends[0].statistics() == TransferStatistics(1, 0, 0)
    assert await ends[1].receive(LINK, 0, [spec_of(tensor)]) == [tensor]
    async with asyncio.timeout(SOON_S):
        await send
    assert ends[0].statistics() == TransferStatistics(0, 0, 1)
    assert ends[1].statistics() == TransferStatistics(0, 0, 1)


async def test_a_receive_may_come_first(ends: Ends) -> None:
    """A posted receive waits for its sender."""
    tensor = torch.ones(3)
    receive = asyncio.create_task(ends[1].receive(LINK, 0, [spec_of(tensor)]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not receive.done()
    assert ends[1].statistics() == TransferStatistics(0, 1, 0)
    async with asyncio.timeout(SOON_S):
        await ends[0].send(LINK, 0, [tensor])
        assert torch.equal((await receive)[0], tensor)


@pytest.mark.parametrize("seed", range(5))
async def test_ends_meet_in_any_order(ends: Ends, seed: int) -> None:
    """Sends and receives of many links and numbers, begun in a random order, all meet."""
    rng = random.Random(seed)
    places = [(Link(a, b), number) for a, b in ((0, 1), (1, 0), (0, 2)) for number in range(20)]
    values = {place: torch.full((2,), float(index)) for index, place in enumerate(places)}
    started: list[asyncio.Task] = []
    received: dict[tuple[Link, int], Tensor] = {}

    async def receive(place: tuple[Link, int]) -> None:
        [received[place]] = await ends[1].receive(*place, [spec_of(values[place])])

    starts = [lambda p=p: ends[0].send(*p, [values[p]]) for p in places]
    starts += [lambda p=p: receive(p) for p in places]
    rng.shuffle(starts)
    for start in starts:
        started.append(asyncio.create_task(start()))
        if rng.random() < 0.3:
            await asyncio.sleep(0)
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(*started)
    assert {place: float(tensor[0]) for place, tensor in received.items()} == {
        place: float(tensor[0]) for place, tensor in values.items()
    }


@pytest.mark.parametrize(
    "announced",
    [
        [TensorSpec((3,), "float32")],
        [TensorSpec((2, 2), "float32")],
        [TensorSpec((4,), "float64")],
        [],
        [TensorSpec((4,), "float32")] * 2,
    ],
    ids=["size", "shape", "dtype", "fewer", "more"],
)
async def test_what_differs_from_its_header_is_an_error(
    ends: Ends, announced: list[TensorSpec]
) -> None:
    """A TransferError names link, number, what came and what was announced; nothing hangs."""
    send = asyncio.create_task(ends[0].send(LINK, 3, [torch.ones(4)]))
    with pytest.raises(TransferError, match=r"number 3 on link 0=>1 brought .*\(4,\).*announced"):
        await ends[1].receive(LINK, 3, announced)
    send.cancel()  # as a failed step does
    await asyncio.gather(send, return_exceptions=True)


async def test_a_spec_s_wish_for_a_gradient_is_no_difference(ends: Ends) -> None:
    """requires_grad belongs to the header, not to the bytes."""
    spec = TensorSpec((4,), "float32", requires_grad=True)
    send = asyncio.create_task(ends[0].send(LINK, 0, [torch.ones(4)]))
    await ends[1].receive(LINK, 0, [spec])
    await send


async def test_sending_a_number_twice_is_an_error(ends: Ends) -> None:
    """The second send is told; the first still reaches its receiver."""
    tensor = torch.ones(2)
    first = asyncio.create_task(ends[0].send(LINK, 0, [tensor]))
    await asyncio.sleep(0)
    with pytest.raises(TransferError, match="number 0 on link 0=>1 was sent twice"):
        await ends[0].send(LINK, 0, [torch.zeros(2)])
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_a_refused_second_send_leaves_the_first_whole(ends: Ends) -> None:
    """After a doubled send was refused, the first one's receiver still finds it."""
    tensor = torch.ones(2)
    first = asyncio.create_task(ends[0].send(LINK, 0, [tensor]))
    await asyncio.sleep(0)
    with pytest.raises(TransferError):
        await ends[0].send(LINK, 0, [torch.zeros(2)])
    receive = asyncio.create_task(ends[1].receive(LINK, 0, [spec_of(tensor)]))
    done, pending = await asyncio.wait([first, receive], timeout=SOON_S)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    assert len(done) == 2


@pytest.mark.parametrize("which", ["send", "receive"])
async def test_a_cancelled_end_leaves_nothing_open(ends: Ends, which: str) -> None:
    """Cancelling either end before the other came forgets the meeting; CancelledError is raised."""
    spec = spec_of(torch.ones(2))
    begun = (
        ends[0].send(LINK, 0, [torch.ones(2)])
        if which == "send"
        else ends[1].receive(LINK, 0, [spec])
    )
    task = asyncio.create_task(begun)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_after_a_cancelled_receive_another_one_is_served(ends: Ends) -> None:
    """A number whose receive was cancelled can be received anew."""
    tensor = torch.ones(2)
    receive = asyncio.create_task(ends[1].receive(LINK, 0, [spec_of(tensor)]))
    await asyncio.sleep(0)
    receive.cancel()
    await asyncio.gather(receive, return_exceptions=True)
    [received] = await _pass(ends, 0, [tensor])
    assert torch.equal(received, tensor)

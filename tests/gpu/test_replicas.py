"""Both twins of collectives between replicas: gloo and in one process, by one contract."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist

from rrfp_async.errors import TransferError
from rrfp_async.gpu.group_replicas import open_replicas
from rrfp_async.gpu.loopback_replicas import ReplicaFabric
from rrfp_async.gpu.replicas import Replicas

RANKS = (1, 3, 5)
CPU = torch.device("cpu")
CLOSES_WITHIN_S = 2.0
CONNECT_S = 10.0


def _in_process() -> list[Replicas]:
    fabric = ReplicaFabric()
    return [fabric.open(RANKS, rank, CPU, time.perf_counter) for rank in RANKS]


def _over_gloo() -> list[Replicas]:
    store = dist.HashStore()
    connect = partial(
        open_replicas,
        RANKS,
        store=store,
        host="127.0.0.1",
        device=CPU,
        timeout_s=CONNECT_S,
        clock=time.perf_counter,
    )
    with ThreadPoolExecutor(len(RANKS)) as pool:
        return list(pool.map(lambda rank: connect(rank=rank), RANKS))


@pytest.fixture(params=[_in_process, _over_gloo], ids=["in one process", "gloo"])
def replicas(request: pytest.FixtureRequest) -> Iterator[Sequence[Replicas]]:
    """Three, connected; closed at the end."""
    ends = request.param()
    yield ends
    for end in ends:
        end.close()


async def test_all_get_the_same_sum_and_their_own_memory(replicas: Sequence[Replicas]) -> None:
    """Bit for bit, also where the order of summing matters, and large."""
    draw = torch.Generator().manual_seed(3)
    parts = torch.randn(len(RANKS), 100_003, generator=draw) * 1e3
    each = [part.clone() for part in parts]
    sums = await asyncio.gather(*(r.sum(p) for r, p in zip(replicas, each, strict=True)))
    assert all(torch.equal(total, sums[0]) for total in sums)
    torch.testing.assert_close(sums[0], parts.sum(0), rtol=1e-5, atol=1e-2)
    assert len({total.data_ptr() for total in sums}) == len(RANKS)
    assert [end.size for end in replicas] == [3, 3, 3]


async def test_calls_meet_in_their_order_however_late_a_replica_is(
    replicas: Sequence[Replicas],
) -> None:
    """Two of them call five times before the third calls at all."""
    early = [asyncio.create_task(_sums(replicas[place], place + 1, 5)) for place in range(2)]
    await asyncio.sleep(0)
    late = await _sums(replicas[2], 3, 5)
    assert await asyncio.gather(*early) == [late, late]
    assert late == [6.0, 12.0, 18.0, 24.0, 30.0]


async def _sums(end: Replicas, value: int, times: int) -> list[float]:
    return [float(await end.sum(torch.tensor([float(value * n)]))) for n in range(1, times + 1)]


async def test_words_of_64_bits_are_handed_round_in_rank_order(
    replicas: Sequence[Replicas],
) -> None:
    """Both ends of the range."""
    words = [(-(2**63), n, 2**63 - 1) for n in range(3)]
    told = await asyncio.gather(*(r.gather(w) for r, w in zip(replicas, words, strict=True)))
    assert told == [words] * 3


async def test_a_replica_that_closes_ends_the_others_waits(replicas: Sequence[Replicas]) -> None:
    """In time, with an error; closing twice is harmless. gloo sees it when it closes itself."""
    waiting = [asyncio.create_task(end.sum(torch.ones(4))) for end in replicas[:2]]
    await asyncio.sleep(0)
    begun = time.perf_counter()
    for end in (replicas[2], *replicas):
        await asyncio.to_thread(end.close) if not _is_loopback(end) else end.close()
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, TransferError), error
        assert "cut off" in str(error)
    assert time.perf_counter() - begun < CLOSES_WITHIN_S


def _is_loopback(end: Replicas) -> bool:
    return type(end).__name__ == "LoopbackReplicas"


async def test_replicas_that_do_not_come_are_named() -> None:
    """Within the time they were given."""
    with pytest.raises(TransferError, match=r"rank 1 cannot connect with replicas \[1, 3\]"):
        await asyncio.to_thread(
            open_replicas,
            (1, 3),
            rank=1,
            store=dist.HashStore(),
            host="127.0.0.1",
            device=CPU,
            timeout_s=0.2,
            clock=time.perf_counter,
        )


async def test_in_one_process_nothing_is_left_of_a_collective_that_was_given_up() -> None:
    """By cancelling all that wait."""
    fabric = ReplicaFabric()
    ends = [fabric.open(RANKS, rank, CPU, time.perf_counter) for rank in RANKS]
    waiting = [asyncio.create_task(end.sum(torch.ones(1))) for end in ends[:2]]
    await asyncio.sleep(0)
    assert fabric.open_meetings == 1
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert fabric.open_meetings == 0
    for end in ends:
        end.close()

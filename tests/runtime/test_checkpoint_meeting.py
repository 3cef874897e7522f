"""How ranks come together for a save or load, over a store of one process."""

import asyncio
from contextlib import suppress

import pytest
import torch.distributed as dist

import rrfp_async as r
from rrfp_async.checkpoint.meeting import Meeting


async def test_a_rank_that_falls_silent_is_named() -> None:
    """One that came to the first point and died there; one that works longer is waited for."""
    store = dist.PrefixStore("meeting", dist.HashStore())
    within = {"world_size": 3, "come_within_s": 9.0, "silent_within_s": 0.4}
    meetings = [Meeting("save", store, rank=rank, **within) for rank in range(3)]
    await asyncio.gather(*(meeting.gather("first") for meeting in meetings))
    working = asyncio.create_task(meetings[1].work(asyncio.sleep(9.0)))
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises(r.CheckpointError, match=r"rank 2 was silent for 0.4 s"):
        async with meetings[0].sharing_faults():
            await meetings[0].gather("second")
    assert 0.4 <= loop.time() - begun < 5.0
    with pytest.raises(r.CheckpointError, match="rank 2 was silent"):
        await working


async def test_a_point_that_all_have_reached_is_passed_whatever_goes_wrong_after() -> None:
    """Else one rank would go on from the last point where another, as late, would fail."""
    store = dist.HashStore()
    within = {"world_size": 2, "come_within_s": 9.0, "silent_within_s": 9.0}
    early, late = (Meeting("save", store, rank=rank, **within) for rank in range(2))
    first = asyncio.create_task(early.gather("last", "a"))
    await asyncio.sleep(0)
    store.set("last/1", "b")
    with suppress(ValueError):
        async with late.sharing_faults():
            raise ValueError("told")
    assert await first == ["a", "b"]


async def test_a_fault_is_raised_though_the_store_is_gone() -> None:
    """A cancellation stays one; anything else tells what happened first."""

    class Gone:
        def compare_set(self, *_: str) -> bytes:
            raise RuntimeError("connection reset")

    within = {"world_size": 2, "come_within_s": 9.0, "silent_within_s": 9.0}
    meeting = Meeting("save", Gone(), rank=0, **within)
    for raised, kind, told in (
        (asyncio.CancelledError(), asyncio.CancelledError, "^$"),
        (ValueError("told"), ValueError, "told"),
        (KeyError("k"), r.CheckpointError, "save failed on rank 0: KeyError: 'k'"),
    ):
        with pytest.raises(kind, match=told):
            async with meeting.sharing_faults():
                raise raised


async def test_a_meetings_keys_go_once_a_later_one_has_ended() -> None:
    """Many saves do not fill the store."""
    store = dist.HashStore()
    within = {"come_within_s": 1.0, "silent_within_s": 1.0}
    meeting = Meeting("save", store, rank=0, world_size=1, **within)
    await meeting.gather("first", "word")
    with suppress(ValueError):
        async with meeting.sharing_faults():
            raise ValueError("told")
    assert store.num_keys() == 3
    meeting.forget()
    assert store.num_keys() == 0

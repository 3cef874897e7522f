"""Saving and loading, from one rank's side: all ranks call it, and it succeeds on all or on none.

The first replica writes what all of them hold, and every rank loads. The order of things: it does
not know what state looks like, on disk or in a module, nor how ranks reach one another.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed.distributed_c10d as c10d

from rrfp_async.checkpoint import storage
from rrfp_async.checkpoint.meeting import Meeting
from rrfp_async.checkpoint.part import Part, check_plain
from rrfp_async.checkpoint.whole import Card, Whole, check_fits, put_together
from rrfp_async.errors import StateError
from rrfp_async.gpu.completion import WaitingThread
from rrfp_async.grid import counted_ranks
from rrfp_async.topology import Topology
from rrfp_async.world import World

T = TypeVar("T")

_EXTRA, _RUN = "extra.", "run."
_FIRST_RANK = 0
_TIDY_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a checkpoint held besides parameters, buffers and optimizer state.

    Attributes:
        run: The Runtime's own values, as it gave them to `save`.
        extra: The user's.
    """

    run: dict[str, Any]
    extra: dict[str, Any]


class Checkpointer:
    """One rank's saves and loads, one at a time. Every rank makes the same calls in the same order.

    Args:
        part: What this rank holds.
        world: This rank's world.
        store: A `torch.distributed.Store` private to the Runtime, shared by all its ranks; or
            None where there is none.
        come_within_s: How long a rank may take to come to a save or load, in seconds.
        silent_within_s: How long a rank may show no sign of life within one, in seconds.
    """

    def __init__(
        self,
        part: Part,
        *,
        world: World,
        store: Any,
        come_within_s: float,
        silent_within_s: float,
    ) -> None:
        self._part = part
        self._world = world
        self._writers = counted_ranks(world.topology)
        writes = world.rank in self._writers
        self._written = world.topology.stages_of(world.place.pp) if writes else ()
        self._store = store
        self._within = {"come_within_s": come_within_s, "silent_within_s": silent_within_s}
        tied = world.topology.tied_parameters
        self._tied = {part.name_of(*owner) for entry in tied for owner in entry.owners}
        self._meetings = 0
        self._past: list[Meeting] = []

    async def save(
        self, path: str | PathLike[str], *, run: Mapping[str, Any], extra: Mapping[str, Any]
    ) -> None:
        """Write all ranks' state as one DCP checkpoint; what was at `path` is replaced by it whole.

        Args:
            path: A folder on a file system that every rank sees.
            run: The Runtime's own values, tensors and plain ones. Rank 0's are written.
            extra: The user's. A key that several ranks give is taken from the lowest.

        Raises:
            ValueError: If the state cannot be saved so, or the path is something else; the same
                on every rank, and nothing was written.
            CheckpointError: If a rank could not write, did not come, or is gone; the same on
                every rank. At `path` is what was there, or the new checkpoint, whole.

        Cancelling it ends it on every rank.
        """
        target = _folder(path)
        call = f"save({str(target)!r})"
        with closing(self._thread()) as thread:
            async with self._meeting(call) as meeting:
                await meeting.work(thread.submit(partial(storage.check_target, target)))
                whole = await self._put_together(meeting, call, extra)
                state = await meeting.work(self._state(whole, run, extra))
                await meeting.gather("ready")  # until now nothing was written
                saving = storage.Saving(target, whole.save_id, self._world.rank)
                try:
                    await self._write(meeting, thread, saving, state)
                except BaseException:
                    if self._world.rank == _FIRST_RANK:
                        tidying = thread.submit(saving.discard)  # after what it still does
                        await asyncio.wait({tidying}, timeout=_TIDY_WITHIN_S)
                    raise

    async def _write(
        self,
        meeting: Meeting,
        thread: WaitingThread,
        saving: storage.Saving,
        state: dict[str, Any],
    ) -> None:
        """Write this rank's part; on the first rank, publish all parts once they are there."""
        await meeting.work(thread.submit(partial(saving.write, state)))
        await meeting.gather("written")
        if self._world.rank == _FIRST_RANK:
            ranks = self._world.topology.world_size
            await meeting.work(thread.submit(partial(saving.publish, ranks)))
        await meeting.gather("published")

    async def load(self, path: str | PathLike[str], *, optimizer: bool = True) -> Loaded:
        """Put the state of a checkpoint in place on all ranks, however many there were.

        Args:
            path: Where it was saved to.
            optimizer: Whether to load the optimizers' state too.

        Raises:
            ValueError: If there is no checkpoint, or it does not fit; the same on every rank, and
                nothing was changed.
            CheckpointError: If a rank could not read, did not come, or is gone; the same on every
                rank.

        Cancelling it ends it on every rank.
        """
        target = _folder(path)
        call = f"load({str(target)!r}, optimizer={optimizer})"
        with closing(self._thread()) as thread:
            async with self._meeting(call) as meeting:
                whole = await self._put_together(meeting, call, {})
                computed = await meeting.work(thread.submit(partial(storage.Reading, target)))
                reading = computed.value
                check_fits(whole, reading.kinds, str(target), optimizer=optimizer)
                keys = self._part.select(reading.kinds, optimizer=optimizer)
                state = (await meeting.work(thread.submit(partial(reading.read, keys)))).value
                put = self._part.prepare(state, optimizer=optimizer)
                await meeting.gather("read")  # until now nothing was changed
                await meeting.work(self._on_device(put))
                await meeting.gather("loaded")
                return Loaded(_section(state, _RUN), _section(state, _EXTRA))

    async def _put_together(self, meeting: Meeting, call: str, extra: Mapping[str, Any]) -> Whole:
        for key, value in extra.items():
            if not isinstance(key, str):
                raise ValueError(f"extra has a key {key!r}: use strings")
            check_plain(f"extra[{key!r}]", value)
        part = self._part
        card = Card(call, part.held(), part.optimized(), [*extra], uuid.uuid4().hex)
        words = await meeting.gather("held", card.word())
        cards = [Card.parse(word) for word in words]
        return put_together(cards, tied=self._tied, writers=self._writers)

    async def _state(
        self, whole: Whole, run: Mapping[str, Any], extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What this rank writes, once all that was launched on the device is done."""
        rank = self._world.rank
        left_out = whole.left_out(self._written)
        state = await self._on_device(partial(self._part.state, leave_out=left_out))
        mine = {key: extra[key] for key, writer in whole.writer_of.items() if writer == rank}
        state |= {_EXTRA + key: value for key, value in mine.items()}
        return state | {_RUN + key: value for key, value in run.items() if rank == _FIRST_RANK}

    async def _on_device(self, function: Callable[[], T]) -> T:
        computed = await self._world.device.run(function)
        if computed.finish is not None:
            await computed.finish
        return computed.value

    @asynccontextmanager
    async def _meeting(self, call: str) -> AsyncIterator[Meeting]:
        if self._store is None:
            raise StateError(
                "this world has no store over which ranks could agree on a checkpoint: use "
                "local_world or torchrun_world"
            )
        _check_whole(self._world.topology, self._part)
        meeting = Meeting(
            call,
            c10d.PrefixStore(f"checkpoint/{self._meetings}", self._store),
            rank=self._world.rank,
            world_size=self._world.topology.world_size,
            **self._within,
        )
        self._meetings += 1
        self._past.append(meeting)
        async with meeting.sharing_faults():
            yield meeting
        while len(self._past) > 1:  # every rank has left those
            await asyncio.to_thread(self._past.pop(0).forget)

    def _thread(self) -> WaitingThread:
        """For what blocks on files; one a call, since an exit does not wait for it."""
        return WaitingThread(self._world.clock, name="rrfp-checkpoint")


def _check_whole(topology: Topology, part: Part) -> None:
    """Refuse state that is in shards on several ranks."""
    if topology.tp > 1:
        raise StateError(
            f"with tp={topology.tp} parameters are in shards on several ranks, which save() and "
            f"load() do not put together yet: use torch.distributed.checkpoint on the stages"
        )
    if part.optimizer_is_sharded:
        raise StateError(
            "ZeroRedundancyOptimizer keeps its state in shards on several ranks, which save() and "
            "load() do not put together yet: use a plain optimizer where checkpoints are needed"
        )


def _folder(path: str | PathLike[str]) -> Path:
    return Path(path).absolute()


def _section(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): v for key, v in state.items() if key.startswith(prefix)}

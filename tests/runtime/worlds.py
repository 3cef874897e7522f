"""Worlds with a bus or a transfer put around the real ones, to hold things back or watch them."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

import rrfp_async as r
from rrfp_async.bus.base import Bus, BusStatistics
from rrfp_async.bus.messages import Message
from rrfp_async.gpu.transfer import Transfer, TransferStatistics
from rrfp_async.ids import Link, TensorSpec
from rrfp_async.world import Wires


def rewired(world: r.World, change: Callable[[Wires], Wires]) -> r.World:
    """The same world, whose wires `change` has had in hand."""

    @asynccontextmanager
    async def connect(config: r.Config) -> AsyncIterator[Wires]:
        async with world.connect(config) as wires:
            yield change(wires)

    return dataclasses.replace(world, connect=connect)


class GatedTransfer(Transfer):
    """Holds the sends that `held` picks (by link and number) until the gate opens."""

    def __init__(
        self, inner: Transfer, held: Callable[[Link, int], bool], gate: asyncio.Event
    ) -> None:
        self._inner = inner
        self._held = held
        self._gate = gate

    def export(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._inner.export(tensor)

    async def send(self, link: Link, sequence: int, tensors: Sequence[torch.Tensor]) -> None:
        if self._held(link, sequence):
            await self._gate.wait()
        await self._inner.send(link, sequence, tensors)

    async def receive(
        self, link: Link, sequence: int, specs: Sequence[TensorSpec]
    ) -> list[torch.Tensor]:
        return await self._inner.receive(link, sequence, specs)

    def statistics(self) -> TransferStatistics:
        return self._inner.statistics()


def gated(
    world: r.World, gate: asyncio.Event, held: Callable[[Link, int], bool] = lambda *_: True
) -> r.World:
    """A world whose sends wait for `gate`, those that `held` picks."""
    return rewired(world, lambda wires: Wires(wires.bus, GatedTransfer(wires.transfer, held, gate)))


class WatchedBus(Bus):
    """Tells `on_read` and `on_send` of everything that passes."""

    def __init__(
        self,
        inner: Bus,
        *,
        on_read: Callable[[], None] = lambda: None,
        on_send: Callable[[int, Message], None] = lambda *_: None,
    ) -> None:
        self._inner = inner
        self._on_read = on_read
        self._on_send = on_send

    @property
    def rank(self) -> int:
        return self._inner.rank

    def send_nowait(self, target: int, message: Message) -> None:
        self._on_send(target, message)
        self._inner.send_nowait(target, message)

    async def next_message(self) -> tuple[int, Message]:
        self._on_read()
        return await self._inner.next_message()

    def statistics(self) -> BusStatistics:
        return self._inner.statistics()

    def close(self) -> None:
        self._inner.close()


def watched(world: r.World, **watchers: Any) -> r.World:
    """A world whose bus tells what passes."""
    return rewired(world, lambda wires: Wires(WatchedBus(wires.bus, **watchers), wires.transfer))


async def each_rank(
    n: int, main: Callable[[r.World], Any], *, topology: r.Topology | None = None
) -> list[Any]:
    """`main` on every rank to its own end: what it returned or raised, by rank.

    Unlike `run_local`, an error on one rank cancels nothing elsewhere: the ranks must find out.
    """
    async with r.local_world(n, topology) as worlds:
        return await asyncio.gather(*(main(world) for world in worlds), return_exceptions=True)

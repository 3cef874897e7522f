"""The twins of the bus. A second one is added to `TWINS` and runs the same contract."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from unittest.mock import patch

import pytest

from rrfp_async.bus import zeromq as zeromq_module
from rrfp_async.bus.base import Bus
from rrfp_async.bus.inproc import InprocHub
from tests.bus.sockets import open_ends


@dataclass(frozen=True)
class Buses:
    """The ends of some ranks, and a way to put raw bytes before one of them."""

    ends: list[Bus]
    put_frame: Callable[[int, bytes], None]

    def __getitem__(self, rank: int) -> Bus:
        return self.ends[rank]


OpenBuses = Callable[..., contextlib.AbstractAsyncContextManager[Buses]]


@contextlib.asynccontextmanager
async def inproc(n: int, *, mailbox_most: int = 65_536) -> AsyncIterator[Buses]:
    """`n` ranks of one process."""
    hub = InprocHub(n, mailbox_most=mailbox_most)
    ends = [hub.open(rank) for rank in range(n)]
    yield Buses(ends, hub.put_frame)
    for end in ends:
        end.close()


@contextlib.asynccontextmanager
async def zeromq(n: int, *, mailbox_most: int = 65_536) -> AsyncIterator[Buses]:
    """`n` ranks with sockets between them, ipc and tcp; raw bytes pass a real peer's socket."""
    with patch.object(zeromq_module, "QUEUE_MOST", mailbox_most):
        async with open_ends(n, host_group=lambda rank: rank % 2) as ends:

            def put_frame(target: int, frame: bytes) -> None:
                ends[0 if target else 1].put_frame(target, frame)

            yield Buses([end.bus for end in ends], put_frame)


TWINS: dict[str, OpenBuses] = {"inproc": inproc, "zeromq": zeromq}


@pytest.fixture(params=list(TWINS))
def open_buses(request: pytest.FixtureRequest) -> OpenBuses:
    """How to open the ends of `n` ranks: as an async context, by `open_buses(n)`."""
    return TWINS[request.param]

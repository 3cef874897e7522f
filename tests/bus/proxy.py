"""A TCP proxy on this loop that forwards, until it cuts what it carries or falls silent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.bus.sockets import LOCALHOST, port_of

_CHUNK_BYTES = 4096


class Proxy:
    """Stands between a rank and one peer's address.

    Attributes:
        connections: How many were ever made to it.
        carried_bytes: How much went towards the peer.
        cut_at_bytes: Cut everything once so much went towards the peer, in the middle of a chunk.
    """

    def __init__(self) -> None:
        self.connections = 0
        self.carried_bytes = 0
        self.cut_at_bytes: int | None = None
        self._target = 0
        self._silent = False
        self._ends: list[asyncio.StreamWriter] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """Where it listens."""
        if self._server is None:
            raise RuntimeError("the proxy is not open")
        return f"tcp://{LOCALHOST}:{self._server.sockets[0].getsockname()[1]}"

    def towards(self, address: str) -> str:
        """Forward to the peer at `address` from now on; returns the proxy's address instead."""
        self._target = port_of(address)
        return self.address

    def cut(self) -> None:
        """Drop every connection at once, whatever is on its way."""
        for end in self._ends:
            end.transport.abort()

    def fall_silent(self) -> None:
        """Keep connections, forward nothing more."""
        self._silent = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        self.connections += 1
        self._ends.append(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(LOCALHOST, self._target)
        except OSError:
            writer.transport.abort()
            return
        self._ends.append(far_writer)
        self._pumps += [
            asyncio.create_task(self._pump(reader, far_writer, counted=True)),
            asyncio.create_task(self._pump(far_reader, writer, counted=False)),
        ]

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(_CHUNK_BYTES):
                if self._silent:
                    continue
                if counted and self._reaches_cut(chunk):
                    writer.write(chunk[: len(chunk) // 2])
                    await asyncio.sleep(0.01)  # let the half go out
                    self.cut()
                    return
                self.carried_bytes += len(chunk) if counted else 0
                writer.write(chunk)
                await writer.drain()
        writer.transport.abort()

    def _reaches_cut(self, chunk: bytes) -> bool:
        limit = self.cut_at_bytes
        return limit is not None and self.carried_bytes + len(chunk) >= limit

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self.serve, LOCALHOST, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)


@contextlib.asynccontextmanager
async def open_proxies(n: int) -> AsyncIterator[list[Proxy]]:
    """Several proxies."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Proxy()) for _ in range(n)]

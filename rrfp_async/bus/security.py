"""Who may speak on the bus: the ranks of this run, by CURVE keys made for it.

Every rank makes a key pair per Runtime and publishes the public half. A connection with any other
key is refused by ZAP before a byte of it reaches the mailbox, and what an accepted one sends is
attributed to the rank of its key, whatever it claims. Secret keys never leave the process.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import zmq
import zmq.auth.asyncio


class KeyPair:
    """A CURVE key pair in Z85, made for one Runtime."""

    def __init__(self) -> None:
        self.public, self._secret = zmq.curve_keypair()

    def serve(self, socket: "zmq.Socket[Any]") -> None:
        """Make `socket` accept CURVE connections under this key. Call before it binds."""
        socket.curve_server = True
        socket.curve_publickey = self.public
        socket.curve_secretkey = self._secret

    def connect(self, socket: "zmq.Socket[Any]", server: bytes) -> None:
        """Make `socket` connect under this key to a server with public key `server`."""
        socket.curve_publickey = self.public
        socket.curve_secretkey = self._secret
        socket.curve_serverkey = server


class PeerKeys:
    """The public keys of the run's ranks: what ZAP asks and what tells senders apart."""

    def __init__(self) -> None:
        self._rank_of: dict[bytes, int] = {}
        self._known = asyncio.Event()

    def learn(self, keys: Mapping[bytes, int]) -> None:
        """Fill in every peer's key. Connections that came earlier have waited for this."""
        self._rank_of = dict(keys)
        self._known.set()

    async def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - ZAP's signature
        """ZAP's question: may a client with this public key (Z85) connect?"""
        await self._known.wait()
        return key in self._rank_of

    def rank_of(self, user_id: str) -> int | None:
        """The rank whose key ZAP accepted as `user_id`."""
        return self._rank_of.get(user_id.encode())


class Gate:
    """ZAP for one zmq context. Start it before anything binds, on the running loop."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: PeerKeys) -> None:
        self._authenticator = zmq.auth.asyncio.AsyncioAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=keys)

    def stop(self) -> None:
        """Stop answering. Yield to the loop once before the context's next use or end."""
        self._authenticator.stop()

"""A connection whose bytes the test writes itself, and listeners that speak to it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from serve_app.transport import authentication, wire
from serve_app.transport.stream_server import StreamServer
from tests.patience import HANG_S

HOST = "127.0.0.1"


class Peer:
    """One end of a connection. Has the methods that `authentication` uses."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, address: wire.Address) -> "Peer":
        return cls(*await asyncio.open_connection(address.host, address.port))

    @classmethod
    async def authenticated(cls, address: wire.Address) -> "Peer":
        peer = await cls.to(address)
        await authentication.prove(peer, address.token)
        return peer

    async def body(self) -> bytes:
        """Of the next frame."""
        async with asyncio.timeout(HANG_S):
            length = int.from_bytes(await self.reader.readexactly(4), "big")
            return await self.reader.readexactly(length)

    async def receive(self) -> wire.WireMessage:
        return wire.decode(await self.body())

    def send(self, message: wire.WireMessage) -> None:
        self.writer.write(wire.frame(message))

    async def closed(self) -> bool:
        """True if the other end closes the connection without sending another byte."""
        async with asyncio.timeout(HANG_S):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:  # it has not read all that was sent
                return True
            finally:
                self.writer.close()


@asynccontextmanager
async def peers(script: Callable[[Peer], Awaitable[None]]) -> AsyncIterator[wire.Address]:
    """A listener that runs `script` for each connection. Its token is "token"."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            await script(Peer(reader, writer))
        writer.close()

    server = await asyncio.start_server(serve, HOST)
    try:
        yield wire.Address(HOST, server.sockets[0].getsockname()[1], "token")
    finally:
        server.close()


@asynccontextmanager
async def listening(server: StreamServer) -> AsyncIterator[wire.Address]:
    try:
        yield await server.start(HOST)
    finally:
        await server.close(drain_s=0)

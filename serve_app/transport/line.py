"""One connected socket: messages, and raw bytes straight out of memory and into it."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable
from typing import TypeVar

from serve_app.transport import features, handshake, wire
from serve_app.transport.client import CONNECT_TIMEOUT_S, ConnectionLost

PURPOSE = "stream of features"
MAX_MESSAGE_BYTES = 64 * 1024
PIECE_BYTES = 2**20  # sent before it is asked whether the other side still reads

T = TypeVar("T")


class Line:
    """Both sides of the stream between replicas and vision encoders, once it is connected.

    `patience_s`: how long the other side may be silent, or not read, before ConnectionLost is
    raised, as it is when the connection breaks. WireError: it does not speak this protocol.
    """

    def __init__(self, connected: socket.socket, *, patience_s: float) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = connected
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(cls, address: wire.Address, *, patience_s: float) -> "Line":
        """A line to the encoder at `address`; both ends have proved that they know its token."""
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        unconnected = socket.socket(family, socket.SOCK_STREAM)
        line = cls(unconnected, patience_s=patience_s)
        try:
            connecting = line._loop.sock_connect(unconnected, (address.host, address.port))
            await _soon(connecting, min(CONNECT_TIMEOUT_S, patience_s))
            await handshake.prove(
                line.send, line._receive_greeting, token=address.token, purpose=PURPOSE
            )
        except TimeoutError:
            line.close()
            raise ConnectionLost("The encoder has not finished the handshake.") from None
        except BaseException:
            line.close()
            raise
        return line

    async def admit(self, token: str) -> None:
        """The listener's handshake; WireError or TimeoutError: the caller is to be refused."""
        await handshake.admit(self.send, self._receive_greeting, token=token, purpose=PURPOSE)

    @property
    def quiet(self) -> bool:
        """Whether the connection stands and nothing has come that nobody has asked for."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    async def send(self, message: features.Message) -> None:
        await self._sent(memoryview(wire.frame(message)))

    async def send_bytes(self, memory: memoryview) -> None:
        for begin in range(0, len(memory), PIECE_BYTES):
            await self._sent(memory[begin : begin + PIECE_BYTES])

    async def receive(
        self, *, idle: bool = False, limit_bytes: int = MAX_MESSAGE_BYTES
    ) -> features.Message:
        """The next message; with `idle` it may come whenever it likes."""
        prefix = bytearray(wire.LENGTH.size)
        await self.receive_into(memoryview(prefix), idle=idle)
        body = bytearray(wire.checked_length(prefix, limit_bytes))
        await self.receive_into(memoryview(body))
        return features.decode(body)

    async def receive_into(self, memory: memoryview, *, idle: bool = False) -> None:
        """Fills `memory` with what comes next."""
        while memory:
            reading = self._loop.sock_recv_into(self._socket, memory)
            count = await _soon(reading, None if idle else self._patience_s)
            if not count:
                raise ConnectionLost("The other side has closed the connection.")
            memory = memory[count:]

    async def left(self) -> None:
        """Returns when the other side leaves, or speaks though it is not its turn."""
        with contextlib.suppress(OSError):
            await self._loop.sock_recv(self._socket, 1)

    def close(self) -> None:
        self._socket.close()

    async def _receive_greeting(self) -> features.Message:
        return await self.receive(limit_bytes=wire.MAX_HANDSHAKE_BYTES)

    async def _sent(self, piece: memoryview) -> None:
        await _soon(self._loop.sock_sendall(self._socket, piece), self._patience_s)


async def _soon(io: Awaitable[T], timeout_s: float | None) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await io
    except TimeoutError:
        raise ConnectionLost(f"Nothing has moved for {timeout_s} seconds.") from None
    except OSError as error:
        raise ConnectionLost(f"The connection is broken: {error}") from error

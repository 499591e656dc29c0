"""One connected socket: messages, and raw bytes straight out of memory and into it."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable
from typing import TypeVar

from runtime import tls
from runtime.distributed.handshake import Role
from serve_app.transport import features, handshake, wire
from serve_app.transport.channel import Channel, PlainChannel, SecureChannel
from serve_app.transport.client import ConnectionLost
from serve_app.transport.sockets import CONNECT_TIMEOUT_S, connected_socket

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
        self._channel: Channel = PlainChannel(connected)
        self._patience_s = patience_s

    @classmethod
    async def open(cls, address: wire.Address, *, patience_s: float) -> "Line":
        """A line to the encoder at `address`; both ends have proved that they know its token."""
        context = tls.context_for("caller")
        timeout_s = min(CONNECT_TIMEOUT_S, patience_s)
        connecting = connected_socket(address.host, address.port, timeout_s=timeout_s)
        line = cls(await _soon(connecting, timeout_s), patience_s=patience_s)
        try:
            await line._secure(context, "caller", handshake.CALLER_TIMEOUT_S)
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

    async def admit(self, token: str, context: ssl.SSLContext | None) -> None:
        """The listener's handshake; WireError, ConnectionLost or TimeoutError: the caller is to be
        refused."""
        await self._secure(context, "listener", handshake.LISTENER_TIMEOUT_S)
        await handshake.admit(self.send, self._receive_greeting, token=token, purpose=PURPOSE)

    @property
    def quiet(self) -> bool:
        """Whether the connection stands and nothing has come that nobody has asked for; to be
        closed otherwise."""
        return self._channel.quiet

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
            reading = self._channel.receive_into(memory)
            count = await _soon(reading, None if idle else self._patience_s)
            if not count:
                raise ConnectionLost("The other side has closed the connection.")
            memory = memory[count:]

    async def left(self) -> None:
        """Returns when the other side leaves, or speaks though it is not its turn."""
        with contextlib.suppress(OSError):
            await self._channel.receive_into(memoryview(bytearray(1)))

    def close(self) -> None:
        self._channel.close()

    async def _secure(self, context: ssl.SSLContext | None, role: Role, timeout_s: float) -> None:
        """The handshake of TLS where it is configured, before anything else is sent."""
        if context is None:
            return
        self._channel = channel = SecureChannel(self._socket, context, role)
        try:
            async with asyncio.timeout(timeout_s):
                await channel.shake_hands()
        except ssl.SSLError as error:
            raise wire.WireError(f"{tls.refusal(error)}.") from error
        except ConnectionError as error:
            raise ConnectionLost(f"The connection is broken: {error}") from error

    async def _receive_greeting(self) -> features.Message:
        return await self.receive(limit_bytes=wire.MAX_HANDSHAKE_BYTES)

    async def _sent(self, piece: memoryview) -> None:
        await _soon(self._channel.send(piece), self._patience_s)


async def _soon(io: Awaitable[T], timeout_s: float | None) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await io
    except TimeoutError:
        raise ConnectionLost(f"Nothing has moved for {timeout_s} seconds.") from None
    except ssl.SSLError as error:  # of TLS 1.3 the end of a handshake, too
        raise ConnectionLost(f"The connection is broken: {tls.refusal(error)}.") from error
    except OSError as error:
        raise ConnectionLost(f"The connection is broken: {error}") from error

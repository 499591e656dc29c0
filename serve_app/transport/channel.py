"""Bytes out of memory and into it over a connected socket, in the clear or by TLS."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from runtime.distributed.handshake import Role

T = TypeVar("T")


class PlainChannel:
    """A non-blocking socket, read and written by the event loop."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._loop = asyncio.get_running_loop()

    @property
    def quiet(self) -> bool:
        """Whether the connection stands and nothing has come; to be closed otherwise."""
        try:
            self._socket.recv(1)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    async def receive_into(self, memory: memoryview) -> int:
        """How many bytes came; 0: the other side has closed the connection."""
        return await self._loop.sock_recv_into(self._socket, memory)

    async def send(self, data: memoryview) -> None:
        await self._loop.sock_sendall(self._socket, data)

    def close(self) -> None:
        self._socket.close()


class SecureChannel:
    """The same by TLS, in which one task may read while another writes."""

    def __init__(self, connected: socket.socket, context: ssl.SSLContext, role: Role) -> None:
        """Takes `connected` over. `shake_hands` comes first."""
        self._socket = context.wrap_socket(
            connected, server_side=role == "listener", do_handshake_on_connect=False
        )
        self._loop = asyncio.get_running_loop()

    @property
    def quiet(self) -> bool:
        try:
            self._socket.recv(1)
        except ssl.SSLWantReadError:
            return True
        except OSError:
            return False
        return False

    async def shake_hands(self) -> None:
        await self._until_done(self._socket.do_handshake)

    async def receive_into(self, memory: memoryview) -> int:
        return await self._until_done(lambda: self._socket.recv_into(memory))

    async def send(self, data: memoryview) -> None:
        while data:
            sent = await self._until_done(partial(self._socket.send, data))
            data = data[sent:]

    def close(self) -> None:
        self._socket.close()

    async def _until_done(self, call: Callable[[], T]) -> T:
        while True:
            try:
                return call()
            except ssl.SSLWantReadError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
            except ssl.SSLWantWriteError:
                await self._ready(self._loop.add_writer, self._loop.remove_writer)

    async def _ready(
        self, add: Callable[..., None], remove: Callable[[socket.socket], object]
    ) -> None:
        moved = asyncio.Event()
        add(self._socket, moved.set)
        try:
            await moved.wait()
        finally:
            remove(self._socket)


Channel = PlainChannel | SecureChannel

"""Sockets of the direct streams: connecting, accepting, and TLS where it is configured."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

from runtime import tls
from serve_app.transport import handshake

# The other side's kernel connects, however busy the process is.
CONNECT_TIMEOUT_S = 2.0
BACKLOG = 128
_PAUSE_S = 1.0  # after a connection could not be accepted

logger = logging.getLogger(__name__)

P = TypeVar("P", bound=asyncio.BaseProtocol)
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def listening_socket(host: str, port: int) -> socket.socket:
    listening = socket.create_server((host, port), family=_family(host), backlog=BACKLOG)
    listening.setblocking(False)
    return listening


async def accept_all(listening: socket.socket, serve: Callable[[socket.socket], object]) -> None:
    """Call `serve` with each connection; until cancelled, which closes the listening socket."""
    loop = asyncio.get_running_loop()
    with listening:
        while True:
            try:
                connected, _ = await loop.sock_accept(listening)
            except OSError as error:  # such as too many open files
                logger.warning("no connection can be accepted: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            serve(connected)


async def accepted_stream(connected: socket.socket, context: ssl.SSLContext | None) -> Stream:
    """The listener's end; with `context` after the handshake of TLS.

    OSError: the caller has left, or its handshake has failed or not ended in time.
    """
    loop = asyncio.get_running_loop()
    reader, protocol = _reading(loop)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol,
        connected,
        ssl=context,
        ssl_handshake_timeout=handshake.LISTENER_TIMEOUT_S if context else None,
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def connected_stream(host: str, port: int, *, timeout_s: float) -> Stream:
    """The caller's end, as `connected_protocol`."""
    loop = asyncio.get_running_loop()
    reader, protocol = _reading(loop)
    transport, _ = await connected_protocol(lambda: protocol, host, port, timeout_s=timeout_s)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def connected_protocol(
    make: Callable[[], P], host: str, port: int, *, timeout_s: float
) -> tuple[asyncio.Transport, P]:
    """The caller's end, secured as configured; its TLS handshake has a timeout of its own.

    OSError (TimeoutError among them): why there is no connection.
    """
    loop = asyncio.get_running_loop()
    context = tls.context_for("caller")
    connected = await connected_socket(host, port, timeout_s=timeout_s)
    try:
        return await loop.create_connection(
            make,
            sock=connected,
            ssl=context,
            server_hostname=host if context else None,
            ssl_handshake_timeout=handshake.CALLER_TIMEOUT_S if context else None,
        )
    except OSError as error:
        raise OSError(tls.refusal(error)) from error


async def connected_socket(host: str, port: int, *, timeout_s: float) -> socket.socket:
    """OSError, TimeoutError: nothing listens there, or the host does not answer in time."""
    connected = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(connected, (host, port))
    except BaseException:
        connected.close()
        raise
    return connected


def _reading(
    loop: asyncio.AbstractEventLoop,
) -> tuple[asyncio.StreamReader, asyncio.StreamReaderProtocol]:
    reader = asyncio.StreamReader(loop=loop)
    return reader, asyncio.StreamReaderProtocol(reader, loop=loop)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET

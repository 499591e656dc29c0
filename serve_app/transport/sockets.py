"""Connecting and accepting: TCP, then TLS if configured, then mutual authentication."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Mapping

from runtime import tls
from runtime.errors import ConfigurationError
from serve_app.transport import authentication
from serve_app.transport.connection import FramedConnection
from serve_app.transport.wire import MAX_REPLY_BYTES, Address, ConnectionLost, WireError

# Time limit of connecting, which the other host's kernel does even if the process is busy.
CONNECT_TIMEOUT_S = 2.0
# A lost host is detected by sent data that remains unacknowledged for this long.
UNACKNOWLEDGED_S = 20
# TCP keepalive on idle connections. The other host's kernel answers the probes, so a busy process
# does not count as lost. Callers detect a lost host within three seconds, because they continue
# elsewhere; listeners within minutes, as they only release what the connection takes.
_CALLER_KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 2}
_LISTENER_KEEPALIVE = {"TCP_KEEPIDLE": 120, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
BACKLOG = 128
_PAUSE_S = 1.0  # pause after a connection could not be accepted

logger = logging.getLogger(__name__)


async def connect(address: Address) -> FramedConnection:
    """A connection whose ends have both proved that they know the address's token.

    Raises ConnectionLost with the reason.
    """
    connection = None
    try:
        connection = await _connected(address)
        await authentication.prove(connection, address.token)
        connection.max_frame_bytes = MAX_REPLY_BYTES
        return connection
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, ConfigurationError):  # for a moment while certificates are replaced
            logger.warning("no connection: %s", error)
        if isinstance(
            error, TimeoutError | OSError | ConnectionLost | WireError | ConfigurationError
        ):
            at = f"{address.host}:{address.port}"
            raise ConnectionLost(f"No connection to {at}: {_reason(error)}") from error
        raise


async def accept(
    accepted: socket.socket, context: ssl.SSLContext | None, token: str
) -> FramedConnection:
    """The listener's end, with TLS if `context` is given.

    Raises OSError or ConnectionLost if the caller leaves or its TLS handshake fails, TimeoutError
    if the handshake is too slow, WireError if the caller does not know the token.
    """
    _send_at_once(accepted)
    _enable_keepalive(accepted, _LISTENER_KEEPALIVE)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_S * 1000)
    _, connection = await asyncio.get_running_loop().connect_accepted_socket(
        FramedConnection,
        accepted,
        ssl=context,
        ssl_handshake_timeout=authentication.LISTENER_TIMEOUT_S if context else None,
    )
    try:
        await authentication.admit(connection, token)
    except BaseException:
        connection.close()
        raise
    return connection


def listening_socket(host: str, port: int) -> socket.socket:
    listening = socket.create_server((host, port), family=_family(host), backlog=BACKLOG)
    listening.setblocking(False)
    return listening


async def accept_all(listening: socket.socket, serve: Callable[[socket.socket], object]) -> None:
    """Calls `serve` with each connection until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            accepted, _ = await loop.sock_accept(listening)
        except OSError as error:  # such as too many open files
            logger.warning("no connection can be accepted: %s", error)
            await asyncio.sleep(_PAUSE_S)
            continue
        serve(accepted)


async def _connected(address: Address) -> FramedConnection:
    """The caller's end before authentication. Raises OSError or TimeoutError."""
    loop = asyncio.get_running_loop()
    context = tls.context_for("caller")
    connecting = socket.socket(_family(address.host), socket.SOCK_STREAM)
    try:
        connecting.setblocking(False)
        _send_at_once(connecting)
        _enable_keepalive(connecting, _CALLER_KEEPALIVE)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await loop.sock_connect(connecting, (address.host, address.port))
    except BaseException:
        connecting.close()
        raise
    _, connection = await loop.create_connection(
        FramedConnection,
        sock=connecting,
        ssl=context,
        server_hostname=address.host if context else None,
        ssl_handshake_timeout=authentication.CALLER_TIMEOUT_S if context else None,
    )
    return connection


def _send_at_once(connection: socket.socket) -> None:
    """A small message does not wait until the one before it is acknowledged, which takes 40 ms.
    uvloop sees to it itself, asyncio only for sockets that it has made.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _enable_keepalive(connection: socket.socket, options: Mapping[str, int]) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # not every system has all options
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return tls.refusal(error)
    if isinstance(error, ConfigurationError):  # clients do not get the paths that it names
        return "this host's TLS files cannot be used; its log has the reason."
    if isinstance(error, TimeoutError):
        return "it has not answered in time."
    if isinstance(error, ConnectionLost | ConnectionError) and tls.configured():
        # asyncio's listeners send no TLS alert
        return (
            f"{error} If the other end's log says that it refuses this host's certificate, both "
            "need certificates of one CA (`RAY_TLS_CA_CERT`)."
        )
    if isinstance(error, WireError):
        return f"it is not the expected process. {error}"
    return str(error)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET

"""The socket options of callers, and their errors for connections that the kernel ends."""

import socket
import sys

import pytest

from serve_app.transport import sockets
from serve_app.transport.client import IDLE_S
from serve_app.transport.connection import HOST_LOST, FramedConnection
from serve_app.transport.generation import generation_server
from serve_app.transport.wire import ConnectionLost
from tests.patience import until
from tests.unit.serve_app.fake_replicas import PretendReplica
from tests.unit.serve_app.transport.peer import listening


@pytest.mark.skipif(sys.platform != "linux", reason="the options are Linux's")
async def test_the_kernel_looks_for_a_lost_host_within_three_seconds():
    server = generation_server(PretendReplica().generate)
    async with listening(server) as address:
        connection = await sockets.connect(address)
        assert connection._transport is not None
        connected: socket.socket = connection._transport.get_extra_info("socket")
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, every, count = (
            connected.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + every * count == 3
        # It would also end connections to a busy process whose buffers are full.
        assert not connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        connection.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the options are Linux's")
async def test_the_kernel_ends_idle_connections_of_callers_whose_host_is_lost():
    """Without unacknowledged bytes, `TCP_USER_TIMEOUT` alone never does."""
    server = generation_server(PretendReplica().generate)
    async with listening(server) as address:
        connection = await sockets.connect(address)
        await until(lambda: server._connections)
        (accepted,) = server._connections
        assert accepted._transport is not None
        listener: socket.socket = accepted._transport.get_extra_info("socket")
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle_s = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        assert IDLE_S < idle_s < 5 * IDLE_S, "later than callers close idle connections themselves"
        connection.close()


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
async def test_neither_end_waits_for_acknowledgements_of_small_messages(
    secured: bool, request: pytest.FixtureRequest
):
    if secured:
        request.getfixturevalue("secured")
    server = generation_server(PretendReplica().generate)
    async with listening(server) as address:
        connection = await sockets.connect(address)
        await until(lambda: server._connections)
        (accepted,) = server._connections
        for end in (connection, accepted):
            assert end._transport is not None
            connected: socket.socket = end._transport.get_extra_info("socket")
            assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        connection.close()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError(110, "Connection timed out"), HOST_LOST),
        (ConnectionResetError(104, "reset"), "The other end closed the connection."),
        (None, "The other end closed the connection."),
    ],
)
async def test_the_reason_of_a_lost_connection_is_named(error, reason):
    connection = FramedConnection()
    connection.connection_lost(error)
    with pytest.raises(ConnectionLost, match=reason):
        await connection.receive()

"""Mutual authentication: each end of a connection proves that it knows the token before use."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from runtime.distributed.handshake import Handshake, new_nonce
from serve_app.transport import wire
from serve_app.transport.connection import FramedConnection

PURPOSE = "serving"
# Time limits of the whole handshake. The listener's process may be busy; a genuine caller rarely
# is.
CALLER_TIMEOUT_S = 10.0
LISTENER_TIMEOUT_S = 5.0
MAX_HALF_OPEN = 256


async def admit(connection: FramedConnection, token: str) -> None:
    """The listener's side. WireError: the caller does not know the token. TimeoutError: it has not
    finished within LISTENER_TIMEOUT_S."""
    async with asyncio.timeout(LISTENER_TIMEOUT_S):
        nonce = new_nonce()
        connection.send(wire.Challenge(nonce))
        reply = await connection.receive()
        if not isinstance(reply, wire.Proof):
            raise wire.WireError(f"Expected Proof, received {type(reply).__name__}.")
        handshake = Handshake(token, PURPOSE, nonce, reply.nonce)
        if not handshake.proved("caller", reply.digest):
            raise wire.WireError("The caller does not know the token.")
        connection.send(wire.Accepted(handshake.proof("listener")))


async def prove(connection: FramedConnection, token: str) -> None:
    """The caller's side. Nothing else may be sent before this returns.

    WireError: the listener does not know the token, such as a process that has taken the port of
    a replica that has ended. TimeoutError: it has not finished within CALLER_TIMEOUT_S.
    """
    async with asyncio.timeout(CALLER_TIMEOUT_S):
        challenge = await connection.receive()
        if not isinstance(challenge, wire.Challenge):
            raise wire.WireError(f"Expected Challenge, received {type(challenge).__name__}.")
        handshake = Handshake(token, PURPOSE, challenge.nonce, new_nonce())
        connection.send(wire.Proof(handshake.caller_nonce, handshake.proof("caller")))
        reply = await connection.receive()
        if not isinstance(reply, wire.Accepted):
            raise wire.WireError(f"Expected Accepted, received {type(reply).__name__}.")
        if not handshake.proved("listener", reply.digest):
            raise wire.WireError("The listener does not know the token.")


class HalfOpenConnections:
    """Connections during their handshake. Beyond MAX_HALF_OPEN the oldest is closed.

    A genuine caller finishes its handshake as soon as this process computes its part, and opens few
    at a time (`client.MAX_HANDSHAKES`). So this affects callers that withhold their proof; others
    only while more than MAX_HALF_OPEN are served at once, and those connect again.
    """

    def __init__(self) -> None:
        self._oldest_first: deque[asyncio.Task[Any]] = deque()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context for the handshake of the current task, which may be cancelled inside."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._oldest_first) >= MAX_HALF_OPEN:
            self._oldest_first.popleft().cancel()
        self._oldest_first.append(task)
        try:
            yield
        finally:
            if task in self._oldest_first:
                self._oldest_first.remove(task)

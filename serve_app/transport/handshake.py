"""The handshake of the direct stream: each end proves that it knows the token before it is used."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from runtime.distributed.handshake import Handshake, new_nonce
from serve_app.transport import wire

# For the whole handshake. The listener's process may be busy; an honest caller's rarely is.
CALLER_TIMEOUT_S = 10.0
LISTENER_TIMEOUT_S = 5.0
MAX_HALF_OPEN = 256

Send = Callable[[wire.Challenge | wire.Proof | wire.Accepted], Awaitable[None]]
Receive = Callable[[], Awaitable[Any]]


async def admit(send: Send, receive: Receive, *, token: str, purpose: str) -> None:
    """The listener's side. WireError: the caller does not know the token. TimeoutError: it has not
    finished within LISTENER_TIMEOUT_S."""
    async with asyncio.timeout(LISTENER_TIMEOUT_S):
        nonce = new_nonce()
        await send(wire.Challenge(nonce))
        answer = await receive()
        if not isinstance(answer, wire.Proof):
            raise wire.WireError(f"{type(answer).__name__} where Proof was due.")
        handshake = Handshake(token, purpose, nonce, answer.nonce)
        if not handshake.proved("caller", answer.digest):
            raise wire.WireError("The caller does not know the token.")
        await send(wire.Accepted(handshake.proof("listener")))


async def prove(send: Send, receive: Receive, *, token: str, purpose: str) -> None:
    """The caller's side: nothing but the handshake may be sent before this returns.

    WireError: the listener does not know the token, such as a process that has taken the port of
    a replica that has ended. TimeoutError: it has not finished within
    CALLER_TIMEOUT_S.
    """
    async with asyncio.timeout(CALLER_TIMEOUT_S):
        challenge = await receive()
        if not isinstance(challenge, wire.Challenge):
            raise wire.WireError(f"{type(challenge).__name__} where Challenge was due.")
        handshake = Handshake(token, purpose, challenge.nonce, new_nonce())
        await send(wire.Proof(handshake.caller_nonce, handshake.proof("caller")))
        answer = await receive()
        if not isinstance(answer, wire.Accepted):
            raise wire.WireError(f"{type(answer).__name__} where Accepted was due.")
        if not handshake.proved("listener", answer.digest):
            raise wire.WireError("The listener does not know the token.")


class HalfOpen:
    """Connections in their handshake. Beyond MAX_HALF_OPEN the oldest is cut: an honest caller
    finishes within milliseconds, so this costs only those that hold back their proof."""

    def __init__(self) -> None:
        self._oldest_first: deque[asyncio.Task[Any]] = deque()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Around the handshake of the current task, which may be cancelled meanwhile."""
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

"""The listener's end: one request at a time per connection, passed to the handler of its kind."""

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from runtime import tls
from serve_app.logs import get_logger, without_texts
from serve_app.transport import authentication, wire
from serve_app.transport.connection import FramedConnection
from serve_app.transport.sockets import accept, accept_all, listening_socket

# How long the requests of a stopping process have to end or to continue elsewhere.
DRAIN_S = 20.0

logger = logging.getLogger(__name__)
log = get_logger()

# A function that sends the replies to a request. An error that it raises is sent as `Failed`.
Handler = Callable[[Any, FramedConnection], Awaitable[None]]


class StreamServer:
    """Serves callers that know its token. A caller that leaves cancels its request's handler.

    `handlers`: handlers by the class of the request. `max_request_bytes`: limit of a request's
    frame. `heartbeat_s`: interval of `Heartbeat` to callers with a request, while `alive` holds.
    """

    def __init__(
        self,
        handlers: Mapping[type, Handler],
        *,
        max_request_bytes: int,
        heartbeat_s: float = wire.HEARTBEAT_S,
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._handlers = handlers
        self._max_request_bytes = max_request_bytes
        self._heartbeat_s, self._alive = heartbeat_s, alive
        self._token = secrets.token_hex(32)
        self._tls = tls.context_for("listener")
        self._half_open = authentication.HalfOpenConnections()
        self._serving: set[asyncio.Task[None]] = set()
        self._connections: set[FramedConnection] = set()
        self._requests = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._accepting: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self, host: str, port: int = 0) -> wire.Address:
        listening = listening_socket(host, port)
        bound = listening.getsockname()
        self._accepting = asyncio.create_task(accept_all(listening, self._accept))
        # In a callback, because a task that is cancelled before its first step runs no `finally`.
        self._accepting.add_done_callback(lambda _: listening.close())
        return wire.Address(host, bound[1], self._token, replica=secrets.token_hex(8))

    async def close(self, *, drain_s: float) -> None:
        """Stops accepting requests and sends `Draining`. Running requests have `drain_s` to end or
        to continue elsewhere; then their connections are closed. With 0, `Draining` is not sent."""
        self._closing = True
        if self._accepting is not None:
            await _cancelled([self._accepting])
        if drain_s > 0:
            for connection in self._connections:
                connection.draining = True
                if connection.can_send:
                    connection.send(wire.Draining())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_s)
        await _cancelled(self._serving)

    def _accept(self, accepted: socket.socket) -> None:
        serving = asyncio.create_task(self._serve(accepted))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve(self, accepted: socket.socket) -> None:
        try:
            with self._half_open.entered():
                connection = await accept(accepted, self._tls, self._token)
            connection.max_frame_bytes = self._max_request_bytes
            self._connections.add(connection)
            try:
                await self._answer_all(connection)
            finally:
                self._connections.discard(connection)
                connection.close(flush=True)
        except ssl.SSLError as error:
            logger.warning("connection refused: %s", tls.refusal(error))
        except wire.WireError as error:
            logger.warning("connection refused: %s", error)
        except (wire.ConnectionLost, OSError, TimeoutError):
            pass  # the caller left or did not complete the handshake
        except asyncio.CancelledError:
            pass  # cancelled by `close`, or as the oldest of too many handshakes

    async def _answer_all(self, connection: FramedConnection) -> None:
        while True:
            request = await connection.receive()
            if self._closing:
                connection.send(wire.Draining())
                return
            handler = self._handlers.get(type(request))
            if handler is None:
                raise wire.WireError(f"Expected a request, received {type(request).__name__}.")
            await self._answer(handler, request, connection)

    async def _answer(
        self, handler: Handler, request: wire.WireMessage, connection: FramedConnection
    ) -> None:
        """Runs the handler and sends heartbeats until it ends or the caller leaves."""
        answer = asyncio.create_task(self._handle(handler, request, connection))
        guard = asyncio.create_task(connection.guard())
        try:
            ended: set[asyncio.Task[Any]] = set()
            while not ended:
                ended, _ = await asyncio.wait(
                    {answer, guard},
                    timeout=self._heartbeat_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not ended and connection.can_send and self._alive():
                    connection.send(wire.Draining() if self._closing else wire.Heartbeat())
            await (answer if answer in ended else guard)
        finally:
            await _cancelled([answer, guard])

    async def _handle(
        self, handler: Handler, request: wire.WireMessage, connection: FramedConnection
    ) -> None:
        self._requests += 1
        self._idle.clear()
        try:
            await handler(request, connection)
        except (wire.ConnectionLost, wire.WireError):
            raise
        except Exception as error:
            failed = wire.failed(error)
            if failed.kind == wire.CaravanError.__name__:
                log.error("work failed", what=type(request).__name__, **without_texts(error))
            connection.send(failed)
            await connection.drain()
        finally:
            self._requests -= 1
            if not self._requests:
                self._idle.set()


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits until they have ended, ignoring their results."""
    ending = set(tasks)
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending)
    for task in ending:
        if not task.cancelled():
            task.exception()  # marks it as retrieved

"""The replica's end of the direct stream: tasks in, deltas out, one at a time per connection."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from serve_app.stream import wire
from serve_app.task import ChatDelta, Task

HANDSHAKE_TIMEOUT_S = 5.0
NONCE_BYTES = 32
# With more than this unsent, the next delta is not asked for, and the engine merges meanwhile.
UNSENT_BYTES = 16 * 1024

logger = logging.getLogger(__name__)

Generate = Callable[[Task], AsyncGenerator[ChatDelta, None]]


class StreamServer:
    """Serves `generate` to callers that know `token`. A caller that leaves ends its task."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._token = secrets.token_hex(32)
        self._connections: set[asyncio.Task[None]] = set()
        self._answering = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._server: asyncio.Server | None = None
        self._closing = False

    async def start(self, host: str, port: int = 0) -> wire.Address:
        self._server = await asyncio.start_server(self._accept, host, port)
        bound = self._server.sockets[0].getsockname()
        return wire.Address(host, bound[1], self._token)

    async def close(self, *, drain_s: float) -> None:
        """Accept nothing new, let running answers end for at most `drain_s`, then cut them."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), drain_s)
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        try:
            if await self._admitted(reader, writer):
                await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the caller left, or never said who it is
        except wire.WireError as error:
            logger.warning("stream connection refused: %s", error)
        except asyncio.CancelledError:
            pass  # only `close` cancels a connection, and nothing follows
        finally:
            self._connections.discard(connection)
            writer.close()

    async def _admitted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.transport.set_write_buffer_limits(high=UNSENT_BYTES)
        writer.write(wire.frame(wire.Challenge(nonce)))
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            answer = await wire.read_message(reader, wire.MAX_HANDSHAKE_BYTES)
        if wire.proves(answer, self._token, nonce):
            return True
        logger.warning("stream connection refused: wrong token")
        return False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Always one read ahead: that read failing is how a caller's leaving is noticed."""
        ahead = asyncio.create_task(wire.read_message(reader, wire.MAX_ASK_BYTES))
        try:
            while True:
                message = await ahead
                if self._closing:
                    return
                if not isinstance(message, wire.Ask | wire.AskVectors):
                    raise wire.WireError(f"{type(message).__name__} where Ask was due.")
                ahead = asyncio.create_task(wire.read_message(reader, wire.MAX_ASK_BYTES))
                await self._answer_unless_left(message.task, ahead, writer)
        finally:
            await _cancelled(ahead)

    async def _answer_unless_left(
        self, task: Task, ahead: asyncio.Task[wire.Wire], writer: asyncio.StreamWriter
    ) -> None:
        answer = asyncio.create_task(self._answer(task, writer))
        try:
            await asyncio.wait({answer, ahead}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done() or (not ahead.cancelled() and ahead.exception() is None):
                await answer
        finally:
            await _cancelled(answer)

    async def _answer(self, task: Task, writer: asyncio.StreamWriter) -> None:
        self._answering += 1
        self._idle.clear()
        try:
            async with aclosing(self._generate(task)) as deltas:
                async for delta in deltas:
                    writer.write(wire.frame(wire.Told(delta)))
                    await writer.drain()
        except ConnectionError:
            raise
        except Exception as error:
            message = wire.failed(error)
            if message.kind == wire.CaravanError.__name__:
                logger.exception("request %s failed", task.id)
            writer.write(wire.frame(message))
            await writer.drain()
        finally:
            self._answering -= 1
            if not self._answering:
                self._idle.set()


async def _cancelled(task: asyncio.Task[object]) -> None:
    """Cancel it and wait until it is over, however it ends."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # marks it as seen

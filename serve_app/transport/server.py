"""The replica's end of the direct stream: tasks in, deltas out, one at a time per connection."""

import asyncio
import contextlib
import logging
import math
import secrets
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing

from runtime import tls
from serve_app.gateway.fair_gate import FairGate
from serve_app.gateway.tasks import ChatDelta, Task
from serve_app.transport import handshake, wire
from serve_app.transport.sockets import accept_all, accepted_stream, listening_socket

# With more than this unsent, the next delta is not asked for, and the engine merges meanwhile.
UNSENT_BYTES = 16 * 1024
# A caller whose machine is gone says nothing; what was sent and not confirmed for so long tells.
UNCONFIRMED_S = 20
LEAST_WATCH_S = 0.02

logger = logging.getLogger(__name__)

_FIRST = asyncio.FIRST_COMPLETED

Generate = Callable[[Task], AsyncGenerator[ChatDelta, None]]
# What is to be told now, to whom that many tasks have been told of.
MakeReport = Callable[[int], wire.Report]


class StreamServer:
    """Serves `generate` to callers that know `token`. A caller that leaves ends its task.

    `report`: for those who watch; without it nobody may.
    """

    def __init__(
        self,
        generate: Generate,
        *,
        report: MakeReport | None = None,
        heartbeat_s: float = wire.HEARTBEAT_S,
    ) -> None:
        self._generate = generate
        self._make_report = report
        self._heartbeat_s = heartbeat_s
        self._trial = FairGate(1)
        self._token = secrets.token_hex(32)
        self._connections: set[asyncio.Task[None]] = set()
        self._half_open = handshake.HalfOpen()
        self._answering = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._tls = tls.context_for("listener")
        self._accepting: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self, host: str, port: int = 0) -> wire.Address:
        listening = listening_socket(host, port)
        bound = listening.getsockname()
        self._accepting = asyncio.create_task(accept_all(listening, self._accept))
        return wire.Address(host, bound[1], self._token, replica=secrets.token_hex(8))

    async def close(self, *, drain_s: float) -> None:
        """Accept nothing new and tell callers to go on elsewhere; answers end or are taken there
        for at most `drain_s`, then they are cut; with 0 they are cut before a word."""
        self._closing = True
        if self._accepting is not None:
            await _cancelled(self._accepting)
        if drain_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_s)
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, connected: socket.socket) -> None:
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNCONFIRMED_S * 1000)
        connection = asyncio.create_task(self._serve_one(connected))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve_one(self, connected: socket.socket) -> None:
        async with AsyncExitStack() as ending:
            try:
                with self._half_open.entered():
                    reader, writer = await accepted_stream(connected, self._tls)
                    ending.callback(writer.close)
                    await self._admit(reader, writer)
                await self._serve(reader, writer)
            except ssl.SSLError as error:
                logger.warning("stream connection refused: %s", tls.refusal(error))
            except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
                pass  # the caller left, or did not finish the handshake
            except wire.WireError as error:
                logger.warning("stream connection refused: %s", error)
            except asyncio.CancelledError:
                pass  # by `close`, or as the oldest of too many in their handshake

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=UNSENT_BYTES)
        send, receive = wire.greetings(reader, writer)
        await handshake.admit(send, receive, token=self._token, purpose=wire.PURPOSE)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Always one read ahead: that read failing is how a caller's leaving is noticed."""
        ahead = asyncio.create_task(wire.read_message(reader, wire.MAX_ASK_BYTES))
        try:
            while True:
                message = await ahead
                if self._closing:
                    writer.write(wire.frame(wire.Draining()))
                    return
                if not isinstance(message, wire.GenerateRequest | wire.EmbedRequest | wire.Watch):
                    raise wire.WireError(f"{type(message).__name__} where Ask was due.")
                ahead = asyncio.create_task(wire.read_message(reader, wire.MAX_ASK_BYTES))
                if isinstance(message, wire.Watch):
                    await self._report_until_left(message, ahead, writer)
                else:
                    await self._answer_unless_left(message, ahead, writer)
        finally:
            await _cancelled(ahead)

    async def _answer_unless_left(
        self,
        ask: wire.GenerateRequest | wire.EmbedRequest,
        ahead: asyncio.Task[wire.Wire],
        writer: asyncio.StreamWriter,
    ) -> None:
        answer = asyncio.create_task(self._answer(ask, writer))
        ended = {answer, ahead}
        try:
            while not (await asyncio.wait(ended, timeout=self._heartbeat_s, return_when=_FIRST))[0]:
                if writer.transport.get_write_buffer_size() < UNSENT_BYTES:
                    writer.write(wire.frame(wire.Draining() if self._closing else wire.Heartbeat()))
            if answer.done() or (not ahead.cancelled() and ahead.exception() is None):
                await answer
        finally:
            await _cancelled(answer)

    async def _report_until_left(
        self, watch: wire.Watch, ahead: asyncio.Task[wire.Wire], writer: asyncio.StreamWriter
    ) -> None:
        """Reports, and beats where there is nothing new, while the caller reads them."""
        if self._make_report is None:
            raise wire.WireError("Watch where nothing is to be seen.")
        every_s = max(LEAST_WATCH_S, watch.every_s)
        told: wire.Report | None = None
        told_at = -math.inf
        while not ahead.done() and not self._closing:
            report = self._make_report(told.taken if told else 0)
            stale = time.monotonic() - told_at >= self._heartbeat_s
            changed = told is None or report.chains or report.load != told.load
            reads = writer.transport.get_write_buffer_size() < UNSENT_BYTES
            if reads and (changed or stale):
                writer.write(wire.frame(report))
                told, told_at = report, time.monotonic()
            await asyncio.wait({ahead}, timeout=every_s)
        if not ahead.done():
            writer.write(wire.frame(wire.Draining()))

    async def _answer(
        self, ask: wire.GenerateRequest | wire.EmbedRequest, writer: asyncio.StreamWriter
    ) -> None:
        self._answering += 1
        self._idle.clear()
        try:
            await self._tell(ask, writer)
        except ConnectionError:
            raise
        except Exception as error:
            message = wire.failed(error)
            if message.kind == wire.CaravanError.__name__:
                logger.exception("request %s failed", ask.task.id)
            writer.write(wire.frame(message))
            await writer.drain()
        finally:
            self._answering -= 1
            if not self._answering:
                self._idle.set()

    async def _tell(
        self, ask: wire.GenerateRequest | wire.EmbedRequest, writer: asyncio.StreamWriter
    ) -> None:
        async with AsyncExitStack() as trial:
            if ask.trial_tokens:
                await trial.enter_async_context(self._trial.place(ask.task.tenant))
                writer.write(wire.frame(wire.TrialStarted()))
            drawn = 0
            async with aclosing(self._generate(ask.task)) as deltas:
                async for delta in deltas:
                    writer.write(wire.frame(wire.DeltaMessage(delta)))
                    await writer.drain()
                    drawn += len(delta.tokens)
                    if drawn >= ask.trial_tokens:
                        await trial.aclose()


async def _cancelled(task: asyncio.Task[object]) -> None:
    """Cancel it and wait until it is over, however it ends."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # marks it as seen

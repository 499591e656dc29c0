"""The replica's request handlers: generation, embeddings, tokens of prompts, load reports."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from serve_app.messages.tasks import ChatDelta, Task
from serve_app.telemetry.request_context import begin_work
from serve_app.transport import wire
from serve_app.transport.connection import FramedConnection
from serve_app.transport.stream_server import Handler, StreamServer

MIN_REPORT_INTERVAL_S = 0.02

Generate = Callable[[Task], AsyncGenerator[ChatDelta, None]]
# Returns the report for a subscriber that has received this many recorded requests.
MakeReport = Callable[[int], wire.LoadReport]


def generation_server(
    generate: Generate,
    *,
    report: MakeReport | None = None,
    heartbeat_s: float = wire.HEARTBEAT_S,
) -> StreamServer:
    """Serves `generate`, and load reports if `report` is given."""

    async def answer(request: wire.TaskRequest, connection: FramedConnection) -> None:
        begin_work(request.task.origin)
        async with aclosing(generate(request.task)) as deltas:
            async for delta in deltas:
                connection.send(wire.DeltaMessage(delta))
                await connection.drain()

    handlers: dict[type, Handler] = {
        wire.GenerateRequest: answer,
        wire.EmbedRequest: answer,
        wire.TokenizeRequest: answer,
    }
    if report is not None:
        handlers[wire.Watch] = ReportHandler(report, heartbeat_s)
    return StreamServer(handlers, max_request_bytes=wire.MAX_TASK_BYTES, heartbeat_s=heartbeat_s)


class ReportHandler:
    """Sends load reports until the caller leaves or the server stops."""

    def __init__(self, report: MakeReport, heartbeat_s: float) -> None:
        self._report = report
        self._heartbeat_s = heartbeat_s

    async def __call__(self, watch: wire.Watch, connection: FramedConnection) -> None:
        sent: wire.LoadReport | None = None
        sent_at = -math.inf
        while not connection.draining:
            report = self._report(sent.recorded if sent else 0)
            stale = time.monotonic() - sent_at >= self._heartbeat_s
            changed = sent is None or report.hashes or report.load != sent.load
            if connection.can_send and (changed or stale):
                connection.send(report)
                sent, sent_at = report, time.monotonic()
            await asyncio.sleep(max(MIN_REPORT_INTERVAL_S, watch.every_s))

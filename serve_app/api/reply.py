"""Generated replies as ASGI responses: the status is sent with the first delta, and clients may
disconnect at any time.

Proxies close connections that are silent for long, and some (Serve's HAProxy when it splices)
notice a disconnected client only when they write. Therefore streams, and after a while single
replies too, send bytes that clients ignore while they wait; the status is then 200.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from runtime.errors import CaravanError
from serve_app.api.connections import through_proxy
from serve_app.api.json_lines import JSON_LINES
from serve_app.api.rate_limiting import metered
from serve_app.api.refusals import Refusal, refusal
from serve_app.logs import get_logger, without_texts
from serve_app.messages.tasks import ChatDelta, merge

JSON = "application/json; charset=utf-8"
BEFORE_LINE = b" "  # a heartbeat: the start of the next line of JSON
# Seconds of silence after which a stream sends a heartbeat.
QUIET_S = 15.0
# Seconds after the first token during which a single reply can still change its status. Then it
# sends blanks; only then is a client noticed that has given up earlier.
SINGLE_QUIET_S = 10.0
HEARTBEAT_S = 1.0
# Common proxies (nginx, AWS load balancers) close connections after a minute of silence.
PROXY_QUIET_S = 45.0

log = get_logger()

_T = TypeVar("_T")


class StreamForm(Protocol):
    """What a stream of one protocol consists of, apart from its content."""

    @property
    def stream_type(self) -> str:
        """The media type of a stream."""

    @property
    def heartbeat(self) -> bytes:
        """Bytes that the stream may send now and that clients ignore."""

    def broken(self, refusal: Refusal) -> bytes:
        """The end of a stream that failed after it had started."""

    def refused(self, refusal: Refusal) -> bytes:
        """The body of an error response."""


class WholeForm(Protocol):
    """What a reply in one piece consists of."""

    def whole(self, delta: ChatDelta) -> bytes:
        """The body of a reply."""

    def refused(self, refusal: Refusal) -> bytes:
        """The body of an error response."""


class ReplyEncoder(StreamForm, WholeForm, Protocol):
    """Encodes the deltas of one request in the format of one protocol."""

    def piece(self, delta: ChatDelta) -> bytes:
        """The bytes of a stream for one delta; the delta with `finish` ends the stream."""


@dataclass(frozen=True, slots=True)
class WholeEncoder:
    """Encodes replies in one piece as JSON. `body`, `error_body`: the values of a reply and of an
    error.

    msgspec, because `json` would hold the event loop for seconds where a reply has many vectors.
    """

    body: Callable[[ChatDelta], Any]
    error_body: Callable[[Refusal], Any]

    def whole(self, delta: ChatDelta) -> bytes:
        return msgspec.json.encode(self.body(delta))

    def refused(self, refusal: Refusal) -> bytes:
        return msgspec.json.encode(self.error_body(refusal))


class Reply(Response):
    """Sends the output of a generation, and ends the generation when the client disconnects.

    `ending`: awaited when the last delta is encoded, before it is sent; it does not raise.
    """

    def __init__(
        self,
        deltas: AsyncGenerator[ChatDelta, None],
        encoder: ReplyEncoder,
        *,
        stream: bool,
        ending: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._deltas = deltas
        self._encoder = encoder
        self._stream = stream
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = metered(self._deltas, scope)
        if self._stream:
            answer = _send_stream(generation, self._piece, self._encoder, send)
        else:
            answer = _send_whole(generation, self._encoder, self._end, send)
        await _cancel_on_disconnect(answer, receive)

    async def _piece(self, delta: ChatDelta) -> bytes:
        piece = self._encoder.piece(delta)
        if delta.finish is not None:
            await self._end()
        return piece

    async def _end(self) -> None:
        if self._ending is not None:
            await self._ending()


class WholeReply(Response):
    """Sends the output of a task in one piece, and ends the task when the client disconnects."""

    def __init__(self, deltas: AsyncGenerator[ChatDelta, None], form: WholeForm) -> None:
        self._deltas = deltas
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _send_whole(metered(self._deltas, scope), self._form, _nothing, send)
        await _cancel_on_disconnect(answer, receive)


async def _nothing() -> None:
    """Ends a reply that has nothing to await at its end."""


async def _send_whole(
    generation: AsyncGenerator[ChatDelta, None],
    form: WholeForm,
    end: Callable[[], Awaitable[None]],
    send: Send,
) -> None:
    """Sends the deltas as one body, encoded before `end`; or an error that precedes the first."""
    async with aclosing(generation) as deltas:
        try:
            first = await anext(deltas)
        except Exception as error:
            await _refuse(error, form.refused, send)
            return

        async def whole() -> bytes:
            body = form.whole(merge([first, *[delta async for delta in deltas]]))
            await end()
            return body

        await _send_single(whole(), form.refused, send, quiet_s=SINGLE_QUIET_S)


class SingleReply(Response):
    """A response with the body that `work` returns, or with `refused` of its error.

    The status is sent with the body, or earlier if a proxy in front (`through_proxy`) would time
    out. `media_type` is None for a reply without content, which may consist of blanks. Errors are
    always JSON.
    """

    def __init__(
        self,
        work: Callable[[], Awaitable[bytes]],
        refused: Callable[[Refusal], bytes],
        *,
        media_type: str | None = JSON,
    ) -> None:
        self._work = work
        self._refused = refused
        self._media_type = media_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        quiet_s = PROXY_QUIET_S if through_proxy(scope) else math.inf
        answer = _send_single(
            self._work(), self._refused, send, quiet_s=quiet_s, media_type=self._media_type
        )
        await _cancel_on_disconnect(answer, receive)


class LinesReply(Response):
    """Streams lines of JSON, at least one. The status is sent with the first line or heartbeat; an
    error after that is the last line, with `refused` of it."""

    def __init__(
        self, lines: AsyncGenerator[bytes, None], refused: Callable[[Refusal], bytes]
    ) -> None:
        self._lines = lines
        self._form = _LinesForm(refused)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _send_stream(self._lines, _unchanged, self._form, send)
        await _cancel_on_disconnect(answer, receive)


@dataclass(frozen=True)
class _LinesForm:
    refused: Callable[[Refusal], bytes]
    stream_type: ClassVar[str] = JSON_LINES
    heartbeat: ClassVar[bytes] = BEFORE_LINE

    def broken(self, refusal: Refusal) -> bytes:
        return self.refused(refusal)


async def _unchanged(line: bytes) -> bytes:
    return line


async def _cancel_on_disconnect(answer: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Runs `answer`; cancels it when the client disconnects."""
    answering = asyncio.create_task(answer)
    draining = asyncio.create_task(_client_left(receive))
    try:
        await asyncio.wait({answering, draining}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            await answering
    finally:
        for task in (answering, draining):
            task.cancel()
        await asyncio.gather(answering, draining, return_exceptions=True)


async def _send_stream(
    items: AsyncGenerator[_T, None],
    encode: Callable[[_T], Awaitable[bytes]],
    form: StreamForm,
    send: Send,
) -> None:
    """Sends the items, with heartbeats between them. An error is the end of the stream (`broken`),
    or the response (`refused`) if nothing has been sent."""
    failure: Exception | None = None
    head = _start(200, form.stream_type, {"cache-control": "no-cache"})
    async with _Line(send, head, lambda: form.heartbeat, quiet_s=QUIET_S) as line:
        try:
            async with aclosing(items):
                async for item in items:
                    await line.write(await encode(item))
        except Exception as error:
            failure = error
    if failure is not None and not line.begun:
        await _refuse(failure, form.refused, send)
        return
    if failure is not None:
        await send(_body(form.broken(_logged_refusal(failure)), more=True))
    await send(_body(b"", more=False))


async def _send_single(
    body: Awaitable[bytes],
    refused: Callable[[Refusal], bytes],
    send: Send,
    *,
    quiet_s: float,
    media_type: str | None = JSON,
) -> None:
    """Sends `body`, which is JSON or empty, or the error body from `refused`.

    After `quiet_s` of waiting, blanks are sent, which may precede JSON. The status is then 200,
    even for an error.
    """
    head = _start(200, JSON, {})
    async with _Line(send, head, lambda: b" ", quiet_s=quiet_s, heartbeat_s=HEARTBEAT_S) as line:
        status, headers = 200, {}
        try:
            data = await body
        except Exception as error:
            reason = _logged_refusal(error)
            status, headers, data = reason.status, reason.headers, refused(reason)
            media_type = JSON
    if line.begun:
        await send(_body(data, more=False))
    else:
        await _send_complete(status, headers, data, send, media_type)


class _Line:
    """The sending side of a response. The status is sent with the first bytes, which may be a
    heartbeat: one is sent after `quiet_s` without other bytes, then every `heartbeat_s` (None:
    `quiet_s`).
    """

    def __init__(
        self,
        send: Send,
        head: Message,
        heartbeat: Callable[[], bytes],
        *,
        quiet_s: float,
        heartbeat_s: float | None = None,
    ) -> None:
        self.begun = False
        self._send = send
        self._head = head
        self._heartbeat = heartbeat
        self._quiet_s = quiet_s
        self._heartbeat_s = quiet_s if heartbeat_s is None else heartbeat_s
        self._turn = asyncio.Lock()
        self._wrote = False  # whether anything was sent since the last heartbeat

    async def __aenter__(self) -> Self:
        self._beating = asyncio.create_task(self._keep_heartbeat())
        return self

    async def __aexit__(self, *_: object) -> None:
        async with self._turn:  # never cancels in the middle of a message
            self._beating.cancel()

    async def write(self, piece: bytes) -> None:
        async with self._turn:
            if not self.begun:
                self.begun = True
                await self._send(self._head)
            self._wrote = True
            if piece:
                await self._send(_body(piece, more=True))

    async def _keep_heartbeat(self) -> None:
        wait_s = self._quiet_s
        while True:
            await asyncio.sleep(wait_s)
            if not self._wrote:
                await self.write(self._heartbeat())
                wait_s = self._heartbeat_s
            self._wrote = False


async def _refuse(error: Exception, refused: Callable[[Refusal], bytes], send: Send) -> None:
    reason = _logged_refusal(error)
    await _send_complete(reason.status, reason.headers, refused(reason), send)


async def _send_complete(
    status: int, headers: dict[str, str], data: bytes, send: Send, media_type: str | None = JSON
) -> None:
    await send(_start(status, media_type, {"content-length": str(len(data)), **headers}))
    await send(_body(data, more=False))


def _logged_refusal(error: Exception) -> Refusal:
    if not isinstance(error, CaravanError):
        log.error("request failed", **without_texts(error))
    return refusal(error)


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, media_type: str | None, headers: dict[str, str]) -> Message:
    pairs = headers if media_type is None else {"content-type": media_type, **headers}
    raw = [(name.encode(), value.encode()) for name, value in pairs.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}

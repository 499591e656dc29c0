"""Answers as ASGI responses: the status waits for the first delta; a client may leave any time.

Proxies may notice only by writing that a client has left, and an answer that nobody waits for has
to end; others end connections on which nothing is said for a minute. So something is always said.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol, Self

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from runtime.errors import CaravanError
from serve_app.errors import Refusal, refusal
from serve_app.task import ChatDelta, merge

JSON = "application/json; charset=utf-8"
# A single reply that has begun says a blank so often; a stream, after it has said nothing for so
# long, something that its readers pass over. It is its status then that no longer waits.
BEAT_S = 0.25
QUIET_S = 15.0

logger = logging.getLogger(__name__)


class Encoder(Protocol):
    """One request's answer in the words of one protocol."""

    @property
    def stream_type(self) -> str:
        """The media type of a stream."""

    @property
    def beat(self) -> bytes:
        """What a stream may say between its pieces, and means nothing."""

    def piece(self, delta: ChatDelta) -> bytes:
        """What a stream says for this delta; the delta with `finish` ends the stream."""

    def whole(self, delta: ChatDelta) -> bytes:
        """The single reply."""

    def broken(self, refusal: Refusal) -> bytes:
        """How a stream that has begun ends when it cannot be continued."""

    def refused(self, refusal: Refusal) -> bytes:
        """The body of an error status."""


class Reply(Response):
    """Sends what a generation produces, and leaves the generation when the client leaves."""

    def __init__(
        self, deltas: AsyncGenerator[ChatDelta, None], encoder: Encoder, *, stream: bool
    ) -> None:
        self._deltas = deltas
        self._encoder = encoder
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task(self._answer(send))
        leaving = asyncio.create_task(_client_left(receive))
        try:
            await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                await answer
        finally:
            for task in (answer, leaving):
                task.cancel()
            await asyncio.gather(answer, leaving, return_exceptions=True)

    async def _answer(self, send: Send) -> None:
        async with aclosing(self._deltas) as deltas:
            if self._stream:
                await self._send_stream(deltas, send)
            else:
                await self._send_whole(deltas, send)

    async def _send_whole(self, deltas: AsyncGenerator[ChatDelta, None], send: Send) -> None:
        try:
            first = await anext(deltas)
        except Exception as error:
            await self._refuse(error, send)
            return
        failure: Exception | None = None
        # JSON may begin with blanks.
        async with _Line(send, _start(200, JSON, {}), b" ", every_s=BEAT_S) as line:
            try:
                body = self._encoder.whole(merge([first, *[delta async for delta in deltas]]))
            except Exception as error:
                failure = error
        if failure is not None:
            if line.begun:
                raise failure  # a connection that breaks says that the reply is none
            await self._refuse(failure, send)
            return
        if not line.begun:
            await send(_start(200, JSON, {"content-length": str(len(body))}))
        await send(_body(body, more=False))

    async def _send_stream(self, deltas: AsyncGenerator[ChatDelta, None], send: Send) -> None:
        failure: Exception | None = None
        head = _start(200, self._encoder.stream_type, {"cache-control": "no-cache"})
        async with _Line(send, head, self._encoder.beat, every_s=QUIET_S) as line:
            try:
                async for delta in deltas:
                    await line.say(self._encoder.piece(delta))
            except Exception as error:
                failure = error
        if failure is not None and not line.begun:
            await self._refuse(failure, send)
            return
        if failure is not None:
            await send(_body(self._encoder.broken(_told(failure)), more=True))
        await send(_body(b"", more=False))

    async def _refuse(self, error: Exception, send: Send) -> None:
        told = _told(error)
        body = self._encoder.refused(told)
        headers = {"content-length": str(len(body)), **told.headers}
        await send(_start(told.status, JSON, headers))
        await send(_body(body, more=False))


class _Line:
    """A connection for an answer: it begins with the first that is said, be it a `beat` after
    `every_s` of silence, which is never longer."""

    def __init__(self, send: Send, head: Message, beat: bytes, *, every_s: float) -> None:
        self.begun = False
        self._send = send
        self._head = head
        self._beat = beat
        self._every_s = every_s
        self._turn = asyncio.Lock()
        self._said = False  # anything, lately

    async def __aenter__(self) -> Self:
        self._beating = asyncio.create_task(self._beat_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        async with self._turn:  # a message is sent whole or not at all
            self._beating.cancel()

    async def say(self, piece: bytes) -> None:
        async with self._turn:
            if not self.begun:
                self.begun = True
                await self._send(self._head)
            self._said = True
            if piece:
                await self._send(_body(piece, more=True))

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            if not self._said:
                await self.say(self._beat)
            self._said = False


def _told(error: Exception) -> Refusal:
    if not isinstance(error, CaravanError):
        logger.error("a request failed", exc_info=error)
    return refusal(error)


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, media_type: str, headers: dict[str, str]) -> Message:
    pairs = {"content-type": media_type, **headers}
    raw = [(name.encode(), value.encode()) for name, value in pairs.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}

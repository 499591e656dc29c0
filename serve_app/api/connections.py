"""Connections to clients: proxies that announce themselves, HTTP/1.0, unread bodies."""

import asyncio
import random

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SMALL_BODY_BYTES = 64 * 1024
# Random, so that clients that were refused together do not retry together.
REFUSAL_DELAY_S = (0.5, 1.5)
_PROXY_HEADERS = ("forwarded", "via", "x-forwarded-for", "x-real-ip")


def through_proxy(scope: Scope) -> bool:
    """Whether the request has headers of a proxy. Ray Serve's own HAProxy sends none; it has no
    limit on idle time."""
    headers = Headers(scope=scope)
    return any(name in headers for name in _PROXY_HEADERS)


class ConnectionRules:
    """Middleware: sends whole responses to HTTP/1.0 clients, and closes connections with unread
    bodies.

    uvicorn's httptools sends every response of unknown length in chunks, even to HTTP/1.0, and
    HAProxy passes them on. An ASGI application cannot request that the end of the connection ends
    the response, so streams are sent whole at their end, with a Content-Length. Requests through
    other proxies are exempt: nginx before 1.29.7 speaks HTTP/1.0 but reads chunks, and its clients
    may need the stream.

    After a response to a request whose body was not read to its end, uvicorn would keep the
    connection open and receive and discard the rest, which costs more processor time than the
    refusal. Bodies of up to `SMALL_BODY_BYTES` are discarded, because a new connection costs more.
    The response is delayed by a time within `REFUSAL_DELAY_S`, while nothing is received: clients
    that retry at once would otherwise occupy a processor with refusals.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if _has_large_body(scope):
                receive, send = _closing_if_unread(receive, send)
            if scope["http_version"] == "1.0" and not through_proxy(scope):
                send = _Collected(send).send
        await self._app(scope, receive, send)


def _has_large_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    length = headers.get("content-length", "")
    return "transfer-encoding" in headers or (length.isdecimal() and int(length) > SMALL_BODY_BYTES)


def _closing_if_unread(receive: Receive, send: Send) -> tuple[Receive, Send]:
    complete = False

    async def receive_part() -> Message:
        nonlocal complete
        message = await receive()
        complete = message["type"] == "http.request" and not message.get("more_body", False)
        return message

    async def send_part(message: Message) -> None:
        if message["type"] == "http.response.start" and not complete:
            MutableHeaders(scope=message)["connection"] = "close"
            await asyncio.sleep(random.uniform(*REFUSAL_DELAY_S))
        await send(message)

    return receive_part, send_part


class _Collected:
    """A response whose messages are held until its length is known."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        assert self._start is not None
        self._body += message.get("body", b"")
        if not message.get("more_body", False):
            MutableHeaders(scope=self._start)["content-length"] = str(len(self._body))
            await self._send(self._start)
            await self._send({**message, "body": bytes(self._body)})

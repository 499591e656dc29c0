"""What is between client and server: proxies that announce themselves, and HTTP/1.0."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PROXY_HEADERS = ("forwarded", "via", "x-forwarded-for", "x-real-ip")


def through_proxy(scope: Scope) -> bool:
    """Whether a proxy in front announces itself. Ray Serve's own HAProxy does not; it sets no limit
    on silence."""
    headers = Headers(scope=scope)
    return any(name in headers for name in _PROXY_HEADERS)


class WholeForHttp10:
    """Collects replies to HTTP/1.0 clients, and sends them with a Content-Length.

    uvicorn's httptools sends every reply of unknown length in chunks, also to HTTP/1.0, and HAProxy
    passes these on. An ASGI application cannot ask for a reply that ends with its connection, so
    streams come whole at their end. Proxies that announce themselves are exempt: nginx speaks
    HTTP/1.0 before 1.29.7 but reads chunks, and its clients may wait for a stream.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["http_version"] == "1.0" and not through_proxy(scope):
            send = _Collected(send).send
        await self._app(scope, receive, send)


class _Collected:
    """A reply whose messages are held until its length is known."""

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

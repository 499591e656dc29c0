"""Records each HTTP request: its metrics, and its context for what works for it."""

import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.access import key_of
from serve_app.api.error_bodies import route_path
from serve_app.logs import get_logger
from serve_app.telemetry import metrics
from serve_app.telemetry.meter import Meter
from serve_app.telemetry.request_context import HEADER, RequestContext, current_request, request_id

# nginx's status for requests whose client left before the response.
CLIENT_LEFT = 499
# By the prefix of paths; the first match counts.
_PROTOCOLS = (
    ("/v1/messages", "anthropic"),
    ("/v1/", "openai"),
    ("/tokenize", "openai"),
    ("/detokenize", "openai"),
    ("/api/", "ollama"),
)

log = get_logger()


class ObserveRequests:
    """Middleware, the outermost. The header `x-request-id` of the response has the request's id.

    `echoed`: the server sends that header of a request back itself, as Serve does.
    """

    def __init__(self, app: ASGIApp, meter: Meter, *, echoed: bool) -> None:
        self._app = app
        self._meter = meter
        self._echoed = echoed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})  # shared with copies of the scope
        given = Headers(scope=scope).get(HEADER)
        context = RequestContext(request_id(given))
        status = CLIENT_LEFT

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if not self._echoed or context.id != given:
                    MutableHeaders(scope=message)[HEADER] = context.id
            await send(message)

        token = current_request.set(context)
        try:
            await self._app(scope, receive, noted)
        finally:
            self._record(scope, status, time.monotonic() - context.arrived)
            current_request.reset(token)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        path, key = route_path(scope), key_of(scope)
        named = (name for prefix, name in _PROTOCOLS if path.startswith(prefix))
        protocol, name = next(named, "other"), "" if key is None else key.name
        self._meter.add(metrics.REQUESTS, 1, protocol, str(status), name)
        self._meter.observe(metrics.REQUEST_SECONDS, seconds, protocol)
        facts = {"protocol": protocol, "status": status, "key": name or None}
        log.debug("request", method=scope["method"], **facts, seconds=round(seconds, 3))

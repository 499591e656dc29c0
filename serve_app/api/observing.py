"""Records the metrics of each HTTP request, and sets its context (id, span) for all that serve
it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.anthropic_reply import speaks_anthropic
from serve_app.api.monitoring import Exposition
from serve_app.api.openapi_operations import OPERATIONS
from serve_app.api.paths import protocol_of, route_path
from serve_app.logs import get_logger
from serve_app.telemetry import metrics
from serve_app.telemetry.meter import Meter
from serve_app.telemetry.request_context import HEADER, RequestContext, current_request, request_id
from serve_app.telemetry.spans import HEADER as TRACE_HEADER
from serve_app.telemetry.spans import Span, SpanKind, Spans

# nginx's status for requests whose client left before the response.
CLIENT_LEFT = 499
ANTHROPIC_HEADER = "request-id"
ID_HEADERS = (HEADER, ANTHROPIC_HEADER)
# Only paths without parameters are recorded, because parameters could contain texts of users.
_ROUTES = frozenset(each.path for each in OPERATIONS if "{" not in each.path)

log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Telemetry of the ingress. `exposition`: returns the text of `/metrics`. `ids_echoed`: the
    server itself returns the header `x-request-id` of a request, as Serve does."""

    meter: Meter
    exposition: Exposition
    ids_echoed: bool = False
    spans: Spans | None = None


class ObserveRequests:
    """Middleware, the outermost. The headers `x-request-id` and, with spans, `traceparent` of the
    response have the request's id and span. Anthropic's clients read the id from `request-id`."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._meter, self._spans = telemetry.meter, telemetry.spans
        self._ids_echoed = telemetry.ids_echoed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER)
        context, status = RequestContext(request_id(given)), CLIENT_LEFT

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                if not self._ids_echoed or context.id != given:
                    headers[HEADER] = context.id
                if speaks_anthropic(scope):
                    headers[ANTHROPIC_HEADER] = context.id
                if context.traceparent:
                    headers[TRACE_HEADER] = context.traceparent
            await send(message)

        with self._span(scope, context) as span:
            token = current_request.set(context)
            try:
                await self._app(scope, receive, noted)
            finally:
                self._record(scope, context, status)
                current_request.reset(token)
            if span is not None:
                span.set(http__response__status_code=status)
                if status >= 500:
                    span.fail(str(status))

    @contextmanager
    def _span(self, scope: Scope, context: RequestContext) -> Iterator[Span | None]:
        if self._spans is None:
            yield None
            return
        path, method = route_path(scope), scope["method"]
        route = path if path in _ROUTES else None
        name = method if route is None else f"{method} {route}"
        parent = Headers(scope=scope).get(TRACE_HEADER, "")
        with self._spans.span(name, SpanKind.SERVER, parent) as span:
            context.traceparent = span.traceparent
            span.set(http__request__method=method, http__route=route)
            yield span

    def _record(self, scope: Scope, context: RequestContext, status: int) -> None:
        protocol = protocol_of(route_path(scope))
        seconds = time.monotonic() - context.arrived
        self._meter.add(metrics.REQUESTS, 1, protocol, str(status), context.key)
        self._meter.observe(metrics.REQUEST_SECONDS, seconds, protocol)
        facts = {"protocol": protocol, "status": status, "key": context.key or None}
        log.debug("request", method=scope["method"], **facts, seconds=round(seconds, 3))

"""The header with which a client requests a trace of its request."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.api.access import key_of, set_traced
from serve_app.api.error_bodies import error_response, route_path
from serve_app.api.refusals import Refusal

HEADER = "x-caravan-trace"


class PermitTraces:
    """Middleware behind RequireKey: answers 403 to the header `x-caravan-trace: 1` unless the key
    has `trace` or, on servers without keys, `without_keys` is set; 400 to values other than 0 and
    1.
    """

    def __init__(self, app: ASGIApp, *, without_keys: bool) -> None:
        self._app = app
        self._without_keys = without_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        value = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None
        if value is not None:
            refusal = self._refusal(scope, value)
            if refusal is not None:
                await error_response(route_path(scope), refusal)(scope, receive, send)
                return
            if value == "1":
                set_traced(scope)
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, value: str) -> Refusal | None:
        if value not in ("0", "1"):
            return Refusal(400, f"header `{HEADER}` must be 0 or 1")
        key = key_of(scope)
        if value == "0" or (self._without_keys if key is None else key.trace):
            return None
        if key is None:
            reason = "without API keys, requests are traced only with `trace_without_keys: true`"
        else:
            reason = f"API key '{key.name}' may not trace requests; its entry lacks `trace: true`"
        return Refusal(403, reason)

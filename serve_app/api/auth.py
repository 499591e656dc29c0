"""API keys: with any configured, a request must carry one of them as a bearer token."""

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.api.errors import error_response, route_path
from serve_app.api.refusals import Refusal
from serve_app.api.tenant import set_tenant

OPEN_PATHS = frozenset({"/healthz"})


class RequireKey:
    """Answers 401 unless the request has a known key. Health is asked by machines without one."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and route_path(scope) not in OPEN_PATHS:
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            known = self._found(key.strip().encode()) if scheme.lower() == "bearer" else None
            if known is None:
                refusal = Refusal(401, "a valid API key is required: Authorization: Bearer <key>")
                await error_response(route_path(scope), refusal)(scope, receive, send)
                return
            set_tenant(scope, f"key {known + 1}")
        await self._app(scope, receive, send)

    def _found(self, key: bytes) -> int | None:
        """Index of the key. Compares with every key: the time does not tell which was close."""
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        return matches.index(True) if any(matches) else None

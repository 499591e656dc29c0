"""Accepts only requests that came through HAProxy, and takes the client's address from it.

Ingress replicas listen on ports of their own. HAProxy (`serve_app.haproxy`) adds two headers to
each request: the client's address and a secret that it shares with the replicas.
"""

import hmac

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.api.error_bodies import error_response, route_path
from serve_app.api.refusals import Refusal
from serve_app.haproxy import CLIENT_HEADER, SECRET_HEADER


class ThroughProxy:
    """Middleware: answers 403 to requests without the secret; sets the client's address for the
    others and removes both headers.

    Ray answers HAProxy's health checks before this middleware.
    """

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app = app
        self._secret = secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope)
            if not hmac.compare_digest(given.get(SECRET_HEADER, "").encode(), self._secret):
                refused = Refusal(403, "this port takes requests from the server's HAProxy only")
                await error_response(route_path(scope), refused)(scope, receive, send)
                return
            address, _, port = given[CLIENT_HEADER].partition(" ")
            scope = {**scope, "client": (address, int(port)), "headers": list(scope["headers"])}
            headers = MutableHeaders(scope=scope)
            del headers[SECRET_HEADER], headers[CLIENT_HEADER]
        await self._app(scope, receive, send)

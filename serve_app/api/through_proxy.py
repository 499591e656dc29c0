"""Accepts only requests that came through HAProxy, and takes the client's address from it.

Ingress replicas listen on ports of their own. HAProxy (`serve_app.haproxy`) adds two headers to
each request: the client's address and a secret that it shares with the replicas.
"""

import hmac

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Scope

from serve_app.api.refusals import Refusal
from serve_app.haproxy import CLIENT_HEADER, SECRET_HEADER


class ThroughProxy:
    """Check: 403 for requests without the secret, and the end of their connection; sets the
    client's address of the others and removes both headers.

    Ray answers HAProxy's health checks before this check.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def __call__(self, scope: Scope) -> Refusal | None:
        given = Headers(scope=scope)
        if not hmac.compare_digest(given.get(SECRET_HEADER, "").encode(), self._secret):
            reason = "this port takes requests from the server's HAProxy only"
            return Refusal(403, reason, closes=True)
        address, _, port = given[CLIENT_HEADER].partition(" ")
        scope.update(client=(address, int(port)), headers=list(scope["headers"]))
        headers = MutableHeaders(scope=scope)
        del headers[SECRET_HEADER], headers[CLIENT_HEADER]
        return None

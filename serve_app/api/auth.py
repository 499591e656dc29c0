"""Authentication by API key: who may use the server, and who may manage its models."""

from collections.abc import Iterator, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.api.access import key_of, set_key
from serve_app.api.error_bodies import LONGEST_PATH, error_response, route_path
from serve_app.api.keys import ApiKey, key_hash
from serve_app.api.refusals import Refusal
from serve_app.api.tenant import set_tenant

OPEN_PATHS = frozenset({"/healthz"})
# The pages, which ask the user for a key if they need one: their files are below the first path,
# the chat page is at "/", the others are `PAGES`.
PAGE_PATH = "/page"
PAGES = ("/status", "/docs")


def needs_no_key(path: str) -> bool:
    """Whether a path of the application is served without a key."""
    return path in (*OPEN_PATHS, "/", *PAGES) or path.startswith(f"{PAGE_PATH}/")


class RequireKey:
    """Middleware: answers 401 unless the request has a known key or `needs_no_key`.

    The key is a bearer token or, as Anthropic's clients send it, the header `x-api-key`. The name
    of the key becomes the tenant of the request.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey]) -> None:
        self._app = app
        # Lookup time depends only on the hash, which a client cannot choose.
        self._keys = {key.sha256: key for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not needs_no_key(route_path(scope)):
            key = self._key(Headers(scope=scope))
            if key is None:
                refusal = Refusal(
                    401,
                    "a valid API key is required: Authorization: Bearer <key>",
                    code="invalid_api_key",
                )
                await error_response(route_path(scope), refusal)(scope, receive, send)
                return
            set_tenant(scope, key.name)
            set_key(scope, key)
        await self._app(scope, receive, send)

    def _key(self, headers: Headers) -> ApiKey | None:
        found = (self._keys.get(key_hash(key)) for key in _presented_keys(headers))
        return next((key for key in found if key is not None), None)


class RequireManagementKey:
    """Middleware behind RequireKey: answers 403 unless the key may manage models, which includes to
    read the metrics, where all of them are named."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = key_of(scope)
        assert key is not None, "RequireKey sets it"
        if not key.manage:
            path = route_path(scope)
            used = path[:LONGEST_PATH]
            reason = f"API key '{key.name}' may not use {used}; its entry lacks `manage: true`"
            await error_response(path, Refusal(403, reason))(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _presented_keys(headers: Headers) -> Iterator[str]:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield key.strip()
    if "x-api-key" in headers:
        yield headers["x-api-key"].strip()

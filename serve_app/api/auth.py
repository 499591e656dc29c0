"""Authentication by API key: who may use the server, and who may manage its models."""

from collections.abc import Iterator, Sequence

from starlette.datastructures import Headers
from starlette.types import Scope

from serve_app.api.access import key_of, set_key
from serve_app.api.keys import ApiKey, key_hash
from serve_app.api.paths import LONGEST_PATH, route_path
from serve_app.api.refusals import Refusal
from serve_app.api.tenant import set_tenant

# Health checks.
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/health"})
# The pages, which ask the user for a key if they need one: their files are below the first path,
# the chat page is at "/", the others are `PAGES`.
PAGE_PATH = "/page"
PAGES = ("/status", "/docs")


def needs_no_key(path: str) -> bool:
    """Whether a path of the application is served without a key."""
    return path in (*OPEN_PATHS, "/", *PAGES) or path.startswith(f"{PAGE_PATH}/")


class RequireKey:
    """Check: 401 unless the request has a known key or `needs_no_key`.

    The key is a bearer token or, as Anthropic's clients send it, the header `x-api-key`. The name
    of the key becomes the tenant of the request.
    """

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        # Lookup time depends only on the hash, which a client cannot choose.
        self._keys = {key.sha256: key for key in keys}

    def __call__(self, scope: Scope) -> Refusal | None:
        if needs_no_key(route_path(scope)):
            return None
        key = self._key(Headers(scope=scope))
        if key is None:
            reason = "a valid API key is required: Authorization: Bearer <key>"
            return Refusal(401, reason, code="invalid_api_key")
        set_tenant(scope, key.name)
        set_key(scope, key)
        return None

    def _key(self, headers: Headers) -> ApiKey | None:
        found = (self._keys.get(key_hash(key)) for key in _presented_keys(headers))
        return next((key for key in found if key is not None), None)


def require_management_key(scope: Scope) -> Refusal | None:
    """Check behind RequireKey: 403 unless the key may manage models, which includes to read the
    metrics, where all of them are named."""
    key = key_of(scope)
    assert key is not None, "RequireKey sets it"
    if key.manage:
        return None
    used = route_path(scope)[:LONGEST_PATH]
    return Refusal(403, f"API key '{key.name}' may not use {used}; its entry lacks `manage: true`")


def _presented_keys(headers: Headers) -> Iterator[str]:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield key.strip()
    if "x-api-key" in headers:
        yield headers["x-api-key"].strip()

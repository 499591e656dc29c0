"""Which web pages may use the server (`Origin`), and under which host names it is addressed
(`Host`).

Any page in a browser can send requests to a server on loopback or in the local network. Browsers
state the page's origin in `Origin`. With DNS rebinding, a page's own name resolves to the server's
address and the browser sees the same origin: only `Host` shows that the request uses a foreign
name.
"""

import re
from collections.abc import Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import Scope

from serve_app.api.auth import OPEN_PATHS
from serve_app.api.paths import route_path
from serve_app.api.refusals import Refusal
from serve_app.logs import get_logger

# Ollama's defaults (envconfig, AllowedOrigins) and the other names of loopback: pages served from
# the browser's own machine, and applications with their own URL schemes.
LOCAL_ORIGINS = (
    *(
        f"{scheme}://{host}:*"
        for scheme in ("http", "https")
        for host in ("localhost", "*.localhost", "127.0.0.1", "[::1]", "0.0.0.0")
    ),
    *(f"{scheme}://*" for scheme in ("app", "file", "tauri", "vscode-webview", "vscode-file")),
)
# Domains that the public DNS does not delegate, so nobody outside can own names there.
_LOCAL_DOMAINS = (
    ".localhost",
    ".localdomain",
    ".local",
    ".lan",
    ".home",
    ".home.arpa",
    ".internal",
    ".svc",
)
# Clients choose the refused names: at most MOST_LOGGED are logged, each cut to LONGEST_NAME.
MOST_LOGGED = 64
LONGEST_NAME = 80
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/?#@\[\]\\]*)(?::\d*)?", re.IGNORECASE)

log = get_logger()


class RefuseForeignOrigin:
    """Check: 403 for web pages whose origin `allowed` does not match.

    Pages of the server's own origin pass, and requests without an `Origin`: these are not from
    browsers, or are GETs whose responses browsers withhold from foreign pages. `remedy` ends the
    message.
    """

    def __init__(self, allowed: str, remedy: str) -> None:
        self._allowed = re.compile(allowed)
        self._remedy = remedy

    def __call__(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is None or self._allowed.fullmatch(origin):
            return None
        if origin in (f"http://{host}", f"https://{host}"):
            return None
        reason = f"web pages of origin {origin[:80]!r} are not allowed; {self._remedy}"
        return Refusal(403, reason)


class RefuseForeignHost:
    """Check: 403 for requests whose `Host` is a name that others could have resolved to this
    server.

    Addresses, names without a dot and local domains are safe. `allowed` lists further names:
    `*.name` matches all names below, `*` any name. This process's host name is not accepted
    automatically: it belongs to the node of one ingress replica, not to the address that clients
    use. Health checks (`OPEN_PATHS`) are exempt because they send any host name. Each refused name
    is logged once.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        names = {name.lower() for name in allowed}
        self._any = "*" in names
        self._names = frozenset(names)
        below = tuple(name[1:] for name in names if name.startswith("*."))
        self._suffixes = _LOCAL_DOMAINS + below
        self._logged: set[str] = set()

    def __call__(self, scope: Scope) -> Refusal | None:
        host = Headers(scope=scope).get("host", "")
        if self._any or route_path(scope) in OPEN_PATHS or self._is_allowed(host):
            return None
        self._log(host)
        name = host[:LONGEST_NAME]
        return Refusal(403, f"{name!r} is not a known name of this server; see `allowed_hosts`")

    def _is_allowed(self, host: str) -> bool:
        parts = _HOST.fullmatch(host)
        if parts is None:
            return False
        name = parts[1].lower().removesuffix(".")
        if "." not in name and not name.startswith("["):
            return True
        return name in self._names or name.endswith(self._suffixes) or _is_address(name)

    def _log(self, host: str) -> None:
        parts = _HOST.fullmatch(host)
        name = (parts[1] if parts else host).lower()[:LONGEST_NAME]
        if name not in self._logged and len(self._logged) < MOST_LOGGED:
            self._logged.add(name)
            remedy = "if clients use this name for this server, add it to `allowed_hosts`"
            log.warning("host name refused", host=name, remedy=remedy)


def origin_pattern(allowed: Sequence[str]) -> str:
    """A regular expression that matches whole origins. Patterns: `https://name`, `http://*.name:*`
    (all names below, any port), `scheme://*`, and `*` (any origin, including the opaque `null`).
    """
    return "|".join(map(_one_pattern, allowed))


def _one_pattern(allowed: str) -> str:
    if allowed == "*":
        return ".*"
    scheme, _, place = allowed.lower().partition("://")
    if place == "*":
        return re.escape(f"{scheme}://") + ".*"
    host, any_port = place.removesuffix(":*"), place.endswith(":*")
    below = host.startswith("*.")
    name = (r"[^/:@]+" if below else "") + re.escape(host.removeprefix("*"))
    return re.escape(f"{scheme}://") + name + (r"(:\d+)?" if any_port else "")


def _is_address(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True

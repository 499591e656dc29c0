"""Paths of requests, and their protocols."""

from starlette.types import Scope

LONGEST_PATH = 80  # characters of a path in messages
COMPATIBLE = "/v1/"
# Protocols by prefix of a path with a slash appended; the first match counts.
_PROTOCOLS = (
    ("/v1/messages/", "anthropic"),
    (COMPATIBLE, "openai"),
    ("/tokenize/", "openai"),
    ("/detokenize/", "openai"),
    ("/api/", "ollama"),
)


def route_path(scope: Scope) -> str:
    """The path below the prefix at which the application is mounted."""
    prefix, path = scope.get("root_path", ""), scope["path"]
    return path[len(prefix) :] if path.startswith(f"{prefix}/") else path


def protocol_of(path: str) -> str:
    """The protocol of a path of the application; "other" if it belongs to none."""
    path = f"{path}/"
    return next((name for prefix, name in _PROTOCOLS if path.startswith(prefix)), "other")

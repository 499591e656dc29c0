"""JSON on single lines, as the streams of all protocols have it."""

import json
from typing import Any

JSON_LINES = "application/x-ndjson"
EVENTS = "text/event-stream; charset=utf-8"  # without a charset, `requests` assumes ISO 8859-1
# Clients such as `ollama` and those that read with `httpx` also end lines at U+0085, U+2028 and
# U+2029, which JSON allows in strings.
_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\u0085\u2028\u2029"}


def encoded(value: dict[str, Any]) -> bytes:
    return on_one_line(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def json_line(value: dict[str, Any]) -> bytes:
    return encoded(value) + b"\n"


def on_one_line(text: bytes) -> bytes:
    """The JSON text without characters outside ASCII that end lines."""
    for end, escape in _LINE_ENDS.items():
        text = text.replace(end, escape)
    return text

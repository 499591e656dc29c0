"""Lines of JSON, as Ollama's protocol streams them."""

import json
from typing import Any

# Clients such as `ollama` also end lines at these characters, which JSON allows in strings.
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\u0085\u2028\u2029"})


def json_line(value: dict[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.translate(_LINE_ENDS).encode() + b"\n"

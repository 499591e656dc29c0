"""The questions of the streams, in both protocols; each has one deterministic answer."""

import base64
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

# Options that make answers long: a high temperature or a low repeat penalty.
NATIVE = {"temperature": 1e6, "top_k": 0, "top_p": 1.0, "num_predict": 400}
OPENAI = {"temperature": 2, "frequency_penalty": -2, "max_tokens": 400}
KINDS = 16


@dataclass(frozen=True, slots=True)
class Question:
    """A request. `native`: it uses Ollama's protocol instead of OpenAI's."""

    path: str
    body: dict[str, Any]
    native: bool

    def piece(self, line: str) -> str:
        """The text in one line of the answer; ServerError for a JSON error."""
        line = line.removeprefix("data: ").strip()
        if not line or line == "[DONE]":
            return ""
        reply = json.loads(line)
        if "error" in reply:
            raise ServerError(str(reply["error"]))
        return _native(reply) if self.native else _openai(reply)


class ServerError(Exception):
    """The server has returned an error."""


def questions(*, vision: bool) -> list[Question]:
    return [_question(number, vision=vision) for number in range(KINDS)]


def has_vision(model: Path) -> bool:
    """Whether the file contains a vision model."""
    command = [sys.executable, "-m", "serve_app.cli", "show", str(model), "--json"]
    reply = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return bool(reply["memory"]["vision_weight_bytes"])


def _question(number: int, *, vision: bool) -> Question:
    """Every fourth question is not streamed; if the model has vision, every fourth has an image."""
    picture = _picture(number) if vision and number % 4 == 1 else None
    stream = number % 4 != 3
    text = f"What is {number} plus {number + 7}?"
    if number % 2:
        message = {"role": "user", "content": text, **({"images": [picture]} if picture else {})}
        options = {**NATIVE, "seed": number}
        body = {"messages": [message], "stream": stream, "options": options}
        return Question("/api/chat", {"model": "demo", **body}, native=True)
    body = {"messages": [{"role": "user", "content": text}], "stream": stream, "seed": number}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    return Question(
        "/v1/chat/completions", {"model": "demo", **body, **usage, **OPENAI}, native=False
    )


def _picture(number: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), (16 * number, 255 - 16 * number, 90)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _native(reply: dict[str, Any]) -> str:
    counts = f" {reply['prompt_eval_count']} {reply['eval_count']}" if reply["done"] else ""
    return reply["message"]["content"] + counts


def _openai(reply: dict[str, Any]) -> str:
    parts = [(each.get("delta") or each.get("message") or {}) for each in reply["choices"]]
    usage = reply.get("usage") or {}
    counts = f" {usage['prompt_tokens']} {usage['completion_tokens']}" if usage else ""
    return "".join(each.get("content") or "" for each in parts) + counts

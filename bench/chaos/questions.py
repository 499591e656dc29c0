"""What the streams ask, in both protocols; each question has one answer, whoever gives it."""

import base64
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

# So hot, or so fond of repeating itself, that answers are long.
NATIVE = {"temperature": 1e6, "top_k": 0, "top_p": 1.0, "num_predict": 400}
OPENAI = {"temperature": 2, "frequency_penalty": -2, "max_tokens": 400}
KINDS = 16


@dataclass(frozen=True, slots=True)
class Question:
    """A request. `native`: in Ollama's protocol, else in OpenAI's."""

    path: str
    body: dict[str, Any]
    native: bool

    def piece(self, line: str) -> str:
        """What one line of the answer says; JSON that holds an error raises ToldError."""
        line = line.removeprefix("data: ").strip()
        if not line or line == "[DONE]":
            return ""
        told = json.loads(line)
        if "error" in told:
            raise ToldError(str(told["error"]))
        return _native(told) if self.native else _openai(told)


class ToldError(Exception):
    """The server says that it cannot answer."""


def questions(*, seeing: bool) -> list[Question]:
    return [_question(number, seeing=seeing) for number in range(KINDS)]


def sees(model: Path) -> bool:
    """Whether the file contains a vision model."""
    command = [sys.executable, "-m", "serve_app.cli", "show", str(model), "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return bool(told["memory"]["vision_weight_bytes"])


def _question(number: int, *, seeing: bool) -> Question:
    """Every fourth is not streamed, every fourth brings a picture if the model has vision."""
    picture = _picture(number) if seeing and number % 4 == 1 else None
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


def _native(told: dict[str, Any]) -> str:
    counts = f" {told['prompt_eval_count']} {told['eval_count']}" if told["done"] else ""
    return told["message"]["content"] + counts


def _openai(told: dict[str, Any]) -> str:
    said = [(each.get("delta") or each.get("message") or {}) for each in told["choices"]]
    usage = told.get("usage") or {}
    counts = f" {usage['prompt_tokens']} {usage['completion_tokens']}" if usage else ""
    return "".join(each.get("content") or "" for each in said) + counts

"""Streams of all protocols, as clients read them that know lines but not server-sent events."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from serve_app.api.json_lines import JSON_LINES
from tests.unit.serve_app.api.operations import SHORTEST
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client

# `httpx` and `ollama` end lines at each of these.
WORDS = ("a\u0085", "\u2028b✅", "c\u2029d\x0b\x1c\r\n")


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else ():
        yield from texts(item)
    for item in value if isinstance(value, list) else ():
        yield from texts(item)


@pytest.mark.parametrize("path", SHORTEST)
async def test_no_character_of_the_text_ends_a_line_of_a_stream(path: str) -> None:
    body = {"model": "demo", "stream": True, **SHORTEST[path]}
    async with http_client(PretendReplica(WORDS)) as client:
        response = await client.post(path, json=body)
        lines = [line.removeprefix("data: ") for line in response.iter_lines()]
    found = [json.loads(line) for line in lines if line.startswith("{")]
    others = {line for line in lines if not line.startswith(("{", "event: "))}
    assert others <= {"", "[DONE]"}
    sent = "".join(text for value in found for text in texts(value))
    assert all(character in sent for character in "".join(WORDS))


@pytest.mark.parametrize("path", SHORTEST)
async def test_the_charset_of_events_is_stated(path: str) -> None:
    """`requests` reads a text without one as ISO 8859-1."""
    body = {"model": "demo", "stream": True, **SHORTEST[path]}
    async with http_client(PretendReplica(WORDS)) as client:
        kind = (await client.post(path, json=body)).headers["content-type"]
    assert kind in (JSON_LINES, "text/event-stream; charset=utf-8")

"""Examples in the form that an OpenAPI document has them."""

import json
from collections.abc import Iterable
from typing import Any

from serve_app.api.examples import (
    anthropic_examples,
    ollama_examples,
    openai_examples,
    responses_examples,
)
from serve_app.api.examples.example import Example, Examples
from serve_app.api.openapi_operations import JSON, SSE, Operation

EXAMPLES: Examples = {
    **ollama_examples.EXAMPLES,
    **openai_examples.EXAMPLES,
    **responses_examples.EXAMPLES,
    **anthropic_examples.EXAMPLES,
}
# Of the parameters in paths.
PARAMETERS = {"model": "demo", "id": responses_examples.RESPONSE_ID}


def request_examples(operation: Operation) -> dict[str, Any]:
    """The field `examples` of the body's media type; empty if there are none."""
    return _named(
        (example, example.request)
        for example in _examples(operation)
        if example.request is not None
    )


def reply_examples(operation: Operation, media: str) -> dict[str, Any]:
    """The field `examples` of a media type of the reply; empty if there are none. The reply to a
    request has the name of the request."""
    return _named(
        (example, _text(example.reply, media) if example.streamed else example.reply)
        for example in _examples(operation)
        if example.reply is not None and example.streamed == (media != JSON)
    )


def _examples(operation: Operation) -> tuple[Example, ...]:
    return EXAMPLES.get(f"{operation.method} {operation.path}", ())


def _named(values: Iterable[tuple[Example, Any]]) -> dict[str, Any]:
    named = {}
    for example, value in values:
        note = {"description": example.note} if example.note else {}
        if example.streamed:
            named["streamed"] = {"summary": "Streamed", **note, "value": value}
        else:
            named["whole"] = {"summary": "Not streamed", **note, "value": value}
    return {"examples": named} if named else {}


def _text(events: Any, media: str) -> str:
    """The events as lines of JSON, or as server-sent events, whose name is their type."""
    if media != SSE:
        return "".join(f"{_line(event)}\n" for event in events)
    return "".join(_server_sent(event) for event in events)


def _server_sent(event: Any) -> str:
    if isinstance(event, str):
        return f"data: {event}\n\n"
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {_line(event)}\n\n"


def _line(event: Any) -> str:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":"))

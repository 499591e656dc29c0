"""Items of OpenAI's /v1/responses for tool calls and their results.

Models call every tool as a function. A `CallKind` describes the items for calls of one type of
tools. Those of typed tools are in `typed_calls`.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from serve_app.api.content_parts import string
from serve_app.api.custom_tools import call_arguments, input_of
from serve_app.api.reply_reader import Call
from serve_app.api.request_images import UnreadImage
from serve_app.api.responses_parts import IMAGE, TEXTS, Item, content_of, read_parts
from serve_app.api.tools import decoded_arguments

_TOKEN_BYTES = 16
COMPLETED: Item = {"status": "completed"}

StreamEvent = dict[str, Any]
Content = str | tuple[str | UnreadImage, ...]


def new_item_id(prefix: str) -> str:
    """An id for a client's item without one."""
    return f"{prefix}_{secrets.token_hex(_TOKEN_BYTES)}"


def _nothing_left(_: Item) -> Item:
    return {}


def _no_events(_: Item) -> list[StreamEvent]:
    return []


def _read_output(place: str, raw: Item) -> Item:
    output = raw.get("output")
    if not isinstance(output, str):
        output = read_parts(f"{place}.output", output, (*TEXTS, IMAGE))
    return {**COMPLETED, "call_id": string(place, raw, "call_id"), "output": output}


def _output(place: str, item: Item) -> Content:
    output = item["output"]
    return output if isinstance(output, str) else content_of(f"{place}.output", output)


@dataclass(frozen=True, slots=True)
class CallKind:
    """The items for calls of one type of tools, and for their results.

    `call`, `output`: the types of these items. `prefix`, `output_prefix`: the prefixes of their
    ids. `tool`: the name of the tool, if the type of the item determines it. `identified`: whether
    every call has an id; searches on OpenAI's servers have none.

    `written`: makes an item's fields from a call of the model; None if they cannot express its
    arguments. `read`: these fields, from an item that a client sends. `arguments`: the arguments of
    the function, from an item. `begun`: the fields that differ at the start of the item in a
    stream; `events`: the events after the start. By default, the item is complete at its start.

    `read_output`: the fields of a result, from an item that a client sends. `result`: the text and
    images of a result that the model sees. `read` and `read_output` raise RequestError that names
    the field.
    """

    call: str
    prefix: str
    output: str
    output_prefix: str
    written: Callable[[Call], Item | None]
    read: Callable[[str, Item], Item]
    arguments: Callable[[str, Item], dict[str, Any]]
    begun: Callable[[Item], Item] = _nothing_left
    events: Callable[[Item], list[StreamEvent]] = _no_events
    read_output: Callable[[str, Item], Item] = _read_output
    result: Callable[[str, Item], Content] = _output
    tool: str | None = None
    identified: bool = True


Value = TypeVar("Value")


def called(call: Call, kind: type[Value]) -> Value | None:
    """The arguments of a call as `kind`; None if they do not fit it."""
    try:
        return msgspec.convert(call.value(), kind)
    except msgspec.ValidationError:
        return None


# Functions and custom tools: one string, which has events of its own.


def _text_events(field: str, events: str) -> Callable[[Item], list[StreamEvent]]:
    def of(item: Item) -> list[StreamEvent]:
        place = {"item_id": item["id"]}
        return [
            {"type": f"response.{events}.delta", **place, "delta": item[field]},
            {"type": f"response.{events}.done", **place, field: item[field]},
        ]

    return of


FUNCTION = CallKind(
    "function_call",
    "fc",
    "function_call_output",
    "fco",
    written=lambda call: {"arguments": call.arguments or "{}"},
    read=lambda place, raw: {"arguments": string(place, raw, "arguments")},
    arguments=lambda place, item: decoded_arguments(f"{place}.arguments", item["arguments"]),
    begun=lambda _: {"arguments": ""},
    events=_text_events("arguments", "function_call_arguments"),
)
CUSTOM = CallKind(
    "custom_tool_call",
    "ctc",
    "custom_tool_call_output",
    "ctco",
    written=lambda call: {"input": input_of(call)},
    read=lambda place, raw: {"input": string(place, raw, "input")},
    arguments=lambda _, item: call_arguments(item["input"]),
    begun=lambda _: {"input": ""},
    events=_text_events("input", "custom_tool_call_input"),
)

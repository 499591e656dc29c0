"""Items of OpenAI's /v1/responses with calls of tools and with their results.

Models call every tool as a function. `CallKind` describes how the calls of one type of tools, and
their results, are written as items. `typed_calls` has the kinds of tools that a type defines.
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
    """An id for an item of a client that has none."""
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
    """The items with calls of one type of tools, and with their results.

    `call`, `output`: the types of these items; `prefix`, `output_prefix`: of their ids. `tool`: the
    name of the tool that is called, if the type of the items determines it. `identified`: whether
    every call has an id; a search on OpenAI's servers has none.

    `written`: the fields with what the tool gets; None for arguments that these cannot express.
    `read`: these fields of an item that a client sends. `arguments`: those of the function, from
    the item. `begun`: the fields that differ when a stream begins the item; `events`: the events
    that report the rest. By default the item is complete at once.

    `read_output`: the fields of a result that a client sends. `result`: what the model reads.
    `read` and `read_output` raise RequestError that names the field.
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
    """The arguments of a call as `kind`; None for others."""
    try:
        return msgspec.convert(call.value(), kind)
    except msgspec.ValidationError:
        return None


# Functions and custom tools: one text, which their own events report.


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

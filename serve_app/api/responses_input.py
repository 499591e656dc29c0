"""The input items of OpenAI's /v1/responses, and their conversion to messages.

Items are read into a normal form, which is also stored and listed: every item has an id, and a
message's content is a list of parts.
"""

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from model_zoo.chat.messages import Message, ToolCall
from runtime.errors import RequestError
from serve_app.api.content_parts import check_type, joined, string
from serve_app.api.custom_tools import call_arguments
from serve_app.api.fields import MAX_ITEMS
from serve_app.api.request_images import UnreadImage, UnreadMessage, from_url
from serve_app.api.tools import decoded_arguments

ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
MAX_ID_CHARACTERS = 64
_TOKEN_BYTES = 16
# A part's type -> the field with its text.
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_IMAGE = "input_image"
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{4}")

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item, and the name of its field for error messages."""

    place: str
    item: Item


def new_response_id() -> str:
    return f"resp_{secrets.token_hex(_TOKEN_BYTES)}"


def item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of an output item, which contains the id of its response."""
    return f"{prefix}_{response_id.removeprefix('resp_')}{index:04x}"


def response_of(item_id: str) -> str | None:
    """The id of the response that an item belongs to; None if this server did not create it."""
    match = _ITEM_ID.fullmatch(item_id)
    return None if match is None else f"resp_{match[1]}"


def full_name(namespace: str | None, name: str) -> str:
    """The name of a function as the model sees it."""
    return name if namespace is None else f"{namespace}.{name}"


def image_bytes(items: Iterable[Any]) -> int:
    """Size of the images in the items of a request, encoded as in the JSON text."""
    return sum(
        len(part["image_url"])
        for item in items
        if isinstance(item, dict)
        for name in ("content", "output")
        if isinstance(parts := item.get(name), list)
        for part in parts
        if isinstance(part, dict) and isinstance(part.get("image_url"), str)
    )


def read_items(given: str | list[Any]) -> list[Item]:
    """The items of the field `input`; a string stands for a message of the user."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(f"input[{index}]", raw) for index, raw in enumerate(given)]


def unread_messages_of(items: Iterable[PlacedItem]) -> list[UnreadMessage]:
    """The messages. Consecutive reasoning, texts and calls of the assistant form one message; one
    that has text and no calls continues only with calls."""
    unread: list[UnreadMessage] = []
    turn = _Turn()
    for placed in items:
        item, kind = placed.item, placed.item["type"]
        called = kind in _CALLS
        by_assistant = called or kind == "reasoning" or item.get("role") == "assistant"
        if not by_assistant or (turn.complete and not called):
            unread += turn.messages()
            turn = _Turn()
        if by_assistant:
            turn.add(placed)
        elif kind in _OUTPUTS:
            unread.append(_result(placed))
        else:
            content = _content(f"{placed.place}.content", item["content"])
            unread.append(UnreadMessage.of(Message(ROLES[item["role"]]), content))
    return unread + turn.messages()


@dataclass(slots=True)
class _Turn:
    """A message of the assistant, whose items are still being collected."""

    thinking: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return bool(self.texts) and not self.calls

    def add(self, placed: PlacedItem) -> None:
        item = placed.item
        match item["type"]:
            case "reasoning":
                parts = item["content"] or item["summary"]
                self.thinking.append("\n\n".join(part["text"] for part in parts))
            case "message":
                self.texts.append("".join(part["text"] for part in item["content"]))
            case "function_call":
                place = f"{placed.place}.arguments"
                arguments = decoded_arguments(place, item["arguments"])
                name = full_name(item.get("namespace"), item["name"])
                self.calls.append(ToolCall(name, arguments, item["call_id"]))
            case "custom_tool_call":
                name = full_name(item.get("namespace"), item["name"])
                self.calls.append(ToolCall(name, call_arguments(item["input"]), item["call_id"]))

    def messages(self) -> list[UnreadMessage]:
        """The message, as a list of one; empty if there is only reasoning without text."""
        if not (any(self.thinking) or self.texts or self.calls):
            return []
        thinking = "\n\n".join(filter(None, self.thinking)) or None
        message = Message("assistant", thinking=thinking, tool_calls=tuple(self.calls))
        return [UnreadMessage.of(message, "".join(self.texts))]


def _result(placed: PlacedItem) -> UnreadMessage:
    item = placed.item
    message = Message("tool", tool_call_id=item["call_id"])
    output = item["output"]
    text = isinstance(output, str)
    return UnreadMessage.of(message, output if text else _content(f"{placed.place}.output", output))


def _content(place: str, parts: list[Item]) -> str | tuple[str | UnreadImage, ...]:
    return joined(
        [
            from_url(f"{place}[{index}].image_url", part["image_url"])
            if part["type"] == _IMAGE
            else part["text"]
            for index, part in enumerate(parts)
        ]
    )


def _item(place: str, raw: Any) -> Item:
    if isinstance(raw, dict) and raw.get("type") is None and "role" in raw:
        raw = raw | {"type": "message"}
    check_type(place, raw, tuple(_READERS))
    prefix, read = _READERS[raw["type"]]
    id = raw.get("id")
    known = isinstance(id, str) and 0 < len(id) <= MAX_ID_CHARACTERS
    new = f"{prefix}_{secrets.token_hex(_TOKEN_BYTES)}"
    return {"id": id if known else new, "type": raw["type"], **read(place, raw)}


def _message(place: str, raw: Item) -> Item:
    role = raw.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f'field "{place}.role" must be one of {", ".join(ROLES)}')
    content = raw.get("content")
    if role == "assistant":
        parts = _parts(f"{place}.content", content, tuple(_TEXTS))
        parts = [part | {"type": "output_text", "annotations": []} for part in parts]
    else:
        parts = _parts(f"{place}.content", content, (*_TEXTS, _IMAGE))
    return {"status": "completed", "role": role, "content": parts}


def _call(place: str, raw: Item) -> Item:
    names = ["call_id", "name", "input" if raw["type"] == "custom_tool_call" else "arguments"]
    names += [] if raw.get("namespace") is None else ["namespace"]
    return {"status": "completed", **{name: string(place, raw, name) for name in names}}


def _output(place: str, raw: Item) -> Item:
    output = raw.get("output")
    if not isinstance(output, str):
        output = _parts(f"{place}.output", output, (*_TEXTS, _IMAGE))
    return {"status": "completed", "call_id": string(place, raw, "call_id"), "output": output}


def _reasoning(place: str, raw: Item) -> Item:
    """Reasoning text. Encrypted reasoning, which only OpenAI's servers can decrypt, is ignored."""
    content, summary = (
        [
            {"type": kind, "text": part["text"]}
            for part in _parts(f"{place}.{name}", raw.get(name) or [], (kind,))
        ]
        for name, kind in (("content", "reasoning_text"), ("summary", "summary_text"))
    )
    return {"summary": summary, "content": content}


def _reference(place: str, raw: Item) -> Item:
    string(place, raw, "id")
    return {}


def _parts(place: str, content: Any, known: tuple[str, ...]) -> list[Item]:
    """Parts of the `known` types; a string stands for one part."""
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f'field "{place}" must be a string or a list of parts')
    if len(content) > MAX_ITEMS:
        raise RequestError(f'field "{place}" has more than {MAX_ITEMS:,} items')
    parts = []
    for index, part in enumerate(content):
        check_type(f"{place}[{index}]", part, known)
        parts.append(_part(f"{place}[{index}]", part))
    return parts


def _part(place: str, part: Item) -> Item:
    """A part. `detail` is ignored: the model determines the resolution."""
    if part["type"] == _IMAGE:
        if not isinstance(part.get("image_url"), str):
            raise RequestError(
                f'invalid image input: field "{place}.image_url" must be a URL, a string; files '
                "are not served"
            )
        return {"type": _IMAGE, "image_url": part["image_url"], "detail": "auto"}
    text = string(place, part, _TEXTS.get(part["type"], "text"))
    return {"type": "input_text", "text": text}


# An item's type -> the prefix of new ids, and the function that reads its other fields.
_READERS = {
    "message": ("msg", _message),
    "function_call": ("fc", _call),
    "function_call_output": ("fco", _output),
    "custom_tool_call": ("ctc", _call),
    "custom_tool_call_output": ("ctco", _output),
    "reasoning": ("rs", _reasoning),
    "item_reference": ("ref", _reference),
}

"""The input items of OpenAI's /v1/responses, and their conversion to messages.

Items are read into a normal form, which is also stored and listed: every item has an id, and a
message's content is a list of parts.
"""

import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from model_zoo.chat.messages import Message, ToolCall
from model_zoo.grammars.constraint import OutputForm
from runtime.errors import RequestError
from serve_app.api.content_parts import check_type, string
from serve_app.api.output_forms import responses_form
from serve_app.api.request_images import UnreadMessage
from serve_app.api.responses_calls import CallKind, new_item_id
from serve_app.api.responses_parts import IMAGE, TEXTS, Item, content_of, read_parts
from serve_app.api.responses_tools import full_name, tools_in
from serve_app.api.thinking_fields import thinking_for
from serve_app.api.typed_calls import CALLS, KINDS, OUTPUTS

ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
MAX_ID_CHARACTERS = 64
_TOKEN_BYTES = 16
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{4}")
# The types of items that declare tools.
DECLARING = ("tool_search_output", "additional_tools")
# The types of items of OpenAI's tools that have nothing for the model to read: what a search found
# is only in the text that follows, and an image is not shown.
LEFT_OUT = ("web_search_call", "image_generation_call")
# The types of items that change what a request declares: tools (`OfferedTools`), effort and format.
_UNSAID = ("additional_tools", "configuration_update")


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


def image_bytes(items: Iterable[Any]) -> int:
    """Size of the images in the items of a request, encoded as in the JSON text."""
    return sum(
        len(part["image_url"])
        for item in items
        if isinstance(item, dict)
        for name in ("content", "output")
        for part in _listed(item.get(name))
        if isinstance(part, dict) and isinstance(part.get("image_url"), str)
    )


def _listed(value: Any) -> list[Any]:
    """A list of parts; a screenshot is one object."""
    return value if isinstance(value, list) else [value]


def read_items(given: str | list[Any]) -> list[Item]:
    """The items of the field `input`; a string stands for a message of the user."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(f"input[{index}]", raw) for index, raw in enumerate(given)]


def updated(
    items: Iterable[PlacedItem], effort: str | None, form: OutputForm | None
) -> tuple[str | None, OutputForm | None]:
    """The effort of thinking and the form of the text after the items: those of the request, or of
    the last items that state others."""
    for placed in items:
        if placed.item["type"] == "configuration_update":
            item = placed.item
            effort = item.get("reasoning", {}).get("effort", effort)
            if "text" in item:
                form = responses_form(item["text"]["format"], f"{placed.place}.text.format")
    return effort, form


def left_out(given: str | list[Any]) -> set[str]:
    """The types of the items of the field `input` that are left out of the prompt."""
    types = [] if isinstance(given, str) else [each["type"] for each in given if _is_typed(each)]
    return {*types}.intersection(LEFT_OUT)


def _is_typed(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("type"), str)


def unread_messages_of(items: Iterable[PlacedItem]) -> list[UnreadMessage]:
    """The messages. Consecutive reasoning, texts and calls of the assistant form one message; one
    that has text and no calls continues only with calls."""
    unread: list[UnreadMessage] = []
    turn = _Turn()
    calls: dict[str, str | None] = {}  # ids of items with calls -> ids of the calls
    for placed in items:
        item, kind = placed.item, placed.item["type"]
        called = kind in CALLS
        if called:
            calls[item["id"]] = item.get("call_id")
        if kind in _UNSAID or kind in LEFT_OUT:
            continue
        by_assistant = called or kind == "reasoning" or item.get("role") == "assistant"
        if not by_assistant or (turn.complete and not called):
            unread += turn.messages()
            turn = _Turn()
        if by_assistant:
            turn.add(placed)
        elif kind in OUTPUTS:
            call = item["call_id"]
            message = Message("tool", tool_call_id=calls.get(call, call))
            content = OUTPUTS[kind].result(placed.place, item)
            unread.append(UnreadMessage.of(message, content))
        else:
            content = content_of(f"{placed.place}.content", item["content"])
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
            case kind:
                call = CALLS[kind]
                name = call.tool or full_name(item.get("namespace"), item["name"])
                arguments = call.arguments(placed.place, item)
                self.calls.append(ToolCall(name, arguments, item.get("call_id")))

    def messages(self) -> list[UnreadMessage]:
        """The message, as a list of one; empty if there is only reasoning without text."""
        if not (any(self.thinking) or self.texts or self.calls):
            return []
        thinking = "\n\n".join(filter(None, self.thinking)) or None
        message = Message("assistant", thinking=thinking, tool_calls=tuple(self.calls))
        return [UnreadMessage.of(message, "".join(self.texts))]


def _item(place: str, raw: Any) -> Item:
    if isinstance(raw, dict) and raw.get("type") is None and "role" in raw:
        raw = raw | {"type": "message"}
    check_type(place, raw, tuple(_READERS))
    prefix, read = _READERS[raw["type"]]
    id = raw.get("id")
    known = isinstance(id, str) and 0 < len(id) <= MAX_ID_CHARACTERS
    return {"id": id if known else new_item_id(prefix), "type": raw["type"], **read(place, raw)}


def _message(place: str, raw: Item) -> Item:
    role = raw.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f'field "{place}.role" must be one of {", ".join(ROLES)}')
    content = raw.get("content")
    if role == "assistant":
        parts = read_parts(f"{place}.content", content, tuple(TEXTS))
        parts = [part | {"type": "output_text", "annotations": []} for part in parts]
    else:
        parts = read_parts(f"{place}.content", content, (*TEXTS, IMAGE))
    return {"status": "completed", "role": role, "content": parts}


def _call(kind: CallKind, place: str, raw: Item) -> Item:
    names = ["call_id"] if kind.identified or raw.get("call_id") is not None else []
    if kind.tool is None:
        names += ["name"] if raw.get("namespace") is None else ["name", "namespace"]
    identity = {name: string(place, raw, name) for name in names}
    return {"status": "completed", **identity, **kind.read(place, raw)}


def _reasoning(place: str, raw: Item) -> Item:
    """Reasoning text. Encrypted reasoning, which only OpenAI's servers can decrypt, is ignored."""
    content, summary = (
        [
            {"type": kind, "text": part["text"]}
            for part in read_parts(f"{place}.{name}", raw.get(name) or [], (kind,))
        ]
        for name, kind in (("content", "reasoning_text"), ("summary", "summary_text"))
    )
    return {"summary": summary, "content": content}


def _additional_tools(place: str, raw: Item) -> Item:
    tools_in(place, raw)
    return {"role": "developer", "tools": raw["tools"]}


def _search(place: str, raw: Item) -> Item:
    """The search without what was found."""
    action = raw.get("action")
    given = action if isinstance(action, dict) else {}
    names = ("type", "query", "url", "pattern")
    kept = {name: given[name] for name in names if isinstance(given.get(name), str)}
    return {"status": "completed", "action": {"type": "search", **kept}}


def _image_generation(place: str, raw: Item) -> Item:
    return {"status": "completed", "result": None}


def _configuration(place: str, raw: Item) -> Item:
    """The effort and the format of the texts from here on, as far as they are given."""
    kept: Item = {}
    for name, key in (("reasoning", "effort"), ("text", "format")):
        given = raw.get(name)
        if given is not None and not isinstance(given, dict):
            raise RequestError(f'field "{place}.{name}" must be an object')
        if given and given.get(key) is not None:
            kept[name] = {key: given[key]}
    if "reasoning" in kept:
        thinking_for(string(f"{place}.reasoning", kept["reasoning"], "effort"))
    if "text" in kept:
        responses_form(kept["text"]["format"], f"{place}.text.format")
    return kept


def _reference(place: str, raw: Item) -> Item:
    string(place, raw, "id")
    return {}


# An item's type -> the prefix of new ids, and the function that reads its other fields.
_READERS: dict[str, tuple[str, Callable[[str, Item], Item]]] = {
    "message": ("msg", _message),
    "reasoning": ("rs", _reasoning),
    "item_reference": ("ref", _reference),
    "additional_tools": ("at", _additional_tools),
    "configuration_update": ("cu", _configuration),
    "web_search_call": ("ws", _search),
    "image_generation_call": ("ig", _image_generation),
    **{kind.call: (kind.prefix, partial(_call, kind)) for kind in KINDS},
    **{kind.output: (kind.output_prefix, kind.read_output) for kind in KINDS},
}

"""The form of messages that a template reads, found by rendering probes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime.errors import RequestError, TemplateLimitError

if TYPE_CHECKING:
    from model_zoo.chat.messages import ImagePart, Message

Values = dict[str, Any]
Render = Callable[[list[Values], list[Values] | None], str]

# Names by which templates read the reasoning of an assistant's turn.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning", "thought")
IMAGE_TYPES = ("image", "image_url")  # the types of images that templates look for
_PROBE, _KEY = "probed value", "probed_key"
# Offered to templates in probes with calls.
PROBED_TOOL: Values = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city."}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class MessageForm:
    """The form of messages that a template reads.

    `parts`: a text must be a list of one part. `arguments_as_json`: a call's arguments must be JSON
    text instead of an object. `calls_alone`: calls are rendered only in turns whose content is
    None.
    """

    parts: bool = False
    arguments_as_json: bool = False
    calls_alone: bool = False

    def values(self, message: "Message") -> list[Values]:
        """The message as dicts for the template; absent fields have no key.

        A message with content and calls becomes two if the template needs `calls_alone`.
        """
        values: Values = {"role": message.role, "content": self.content(message.content)}
        if message.thinking is not None:
            values |= dict.fromkeys(REASONING_KEYS, message.thinking)
        if message.tool_call_id is not None:
            values["tool_call_id"] = message.tool_call_id
        name = message.name if message.tool_name is None else message.tool_name
        if name is not None:
            values["name"] = name
        if not message.tool_calls:
            return [values]
        calls = [self.call(each.name, each.arguments, each.id) for each in message.tool_calls]
        if not self.calls_alone:
            return [values | {"tool_calls": calls}]
        alone = {"role": message.role, "content": None, "tool_calls": calls}
        return [values, alone] if message.content else [values | alone]

    def content(self, content: "str | tuple[str | ImagePart, ...]") -> str | list[Values]:
        if isinstance(content, str):
            return text_parts(content) if self.parts else content
        return [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in content
        ]

    def call(self, name: str, arguments: Mapping[str, Any], id: str | None) -> Values:
        known = {} if id is None else {"id": id}
        given: Any = dict(arguments)
        if self.arguments_as_json:
            given = json.dumps(given, ensure_ascii=False)
        return {"type": "function", **known, "function": {"name": name, "arguments": given}}


def text_parts(text: str) -> list[Values]:
    return [{"type": "text", "text": text}]


def wants_parts(render: Render) -> bool:
    """Whether the template renders a text only as part of a list, as some templates with images
    do."""

    def shows(content: str | list[Values]) -> bool:
        return _PROBE in rendered(render, [{"role": "user", "content": content}], None)

    return not shows(_PROBE) and shows(text_parts(_PROBE))


def call_form(render: Render, *, parts: bool) -> MessageForm:
    """The first form in which the template renders a call's arguments other than as a Python dict.

    Forms are tried in order of frequency; the most common one is the result if none works.
    """
    for calls_alone in (False, True):
        for as_json in (False, True):
            form = MessageForm(parts, as_json, calls_alone)
            text = rendered(render, _conversation(form), [PROBED_TOOL])
            if _PROBE in text and f"{{'{_KEY}'" not in text:
                return form
    return MessageForm(parts)


def _conversation(form: MessageForm) -> list[Values]:
    call = form.call("probe", {_KEY: _PROBE}, "call00001")
    return [
        {"role": "user", "content": form.content("Probe.")},
        {
            "role": "assistant",
            "content": None if form.calls_alone else form.content(""),
            "tool_calls": [call],
        },
        {
            "role": "tool",
            "content": form.content("Done."),
            "name": "probe",
            "tool_call_id": "call00001",
        },
        {"role": "assistant", "content": form.content("It is done.")},
        {"role": "user", "content": form.content("Thanks.")},
    ]


def rendered(render: Render, messages: list[Values], tools: list[Values] | None) -> str:
    """What a template renders of a probe; nothing if it refuses or fails. Raises
    TemplateLimitError."""
    try:
        return render(messages, tools)
    except TemplateLimitError:
        raise
    except RequestError:
        return ""

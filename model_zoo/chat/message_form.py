"""The form of messages and tools that a template reads, found by rendering probes."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from typing import Any

from model_zoo.chat.messages import Content, Message
from runtime.errors import RequestError, TemplateLimitError

Values = dict[str, Any]
Render = Callable[[list[Values], list[Values] | None], str]
FormRender = Callable[["MessageForm", list[Values], list[Values] | None], str]

# Names by which templates read the reasoning of an assistant's turn.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning", "thought")
IMAGE_TYPES = ("image", "image_url")  # the types of images that templates look for
_PROBE, _KEY, _RESULT, _THOUGHT = "probed value", "probed_key", "Probed result.", "Probed thought."
# Offered to templates in probes with calls.
PROBED_TOOL: Values = {
    "type": "function",
    "function": {
        "name": "probed_tool",
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city."}},
            "required": ["city"],
        },
    },
}
PROBED_NAME: str = PROBED_TOOL["function"]["name"]


class ToolsPlace(Enum):
    """Where a template reads tools; `offered` gives them there."""

    VARIABLE = "the variable `tools`"
    # FunctionGemma's renders them in a turn of the system only.
    BESIDE_SYSTEM = "the variable `tools`, beside a turn of the system"
    FUNCTIONS = "the variable `functions`, a JSON text"  # of Firefunction
    SYSTEM_LIST = "`tools` of the system's turn, a list"  # of GLM 4
    SYSTEM_JSON = "`tools` of the system's turn, a JSON text"  # of Phi 4 mini


class CallsPlace(Enum):
    """Where a template reads calls."""

    TOOL_CALLS = "`tool_calls` of a turn"
    # Of ChatGLM: a turn for each call, with the name as `metadata` and the arguments as content.
    METADATA = "`metadata` of a turn"


class ThinkingPlace(Enum):
    """Where a template reads the thinking of an assistant's turn."""

    FIELDS = "fields of the turn"
    PARTS = "a part of the content"
    # Of Apertus, in which all turns of the assistant must have blocks if one has.
    BLOCKS = "a block of the content"


@dataclass(frozen=True, slots=True)
class MessageForm:
    """The form of messages and tools that a template reads.

    `parts`: a text must be a list of one part. `arguments_as_json`: a call's arguments must be JSON
    text instead of an object. `calls_alone`: calls are rendered only in turns whose content is
    None. `thinking`: where it must be. `tools`, `calls`: where they must be; None if the template
    shows none. `results`: the role of tools' results; None if the
    template shows no turn of theirs.
    """

    parts: bool = False
    arguments_as_json: bool = False
    calls_alone: bool = False
    thinking: ThinkingPlace = ThinkingPlace.FIELDS
    tools: ToolsPlace | None = ToolsPlace.VARIABLE
    calls: CallsPlace | None = CallsPlace.TOOL_CALLS
    results: str | None = "tool"

    def values(self, message: Message) -> list[Values]:
        """The message as dicts for the template; absent fields have no key.

        A message with calls becomes several if the template needs `calls_alone` or `METADATA`.
        """
        thinking = message.thinking
        if self.thinking is ThinkingPlace.BLOCKS and message.role == "assistant":
            thinking = thinking or ""
        values: Values = {"role": self.role(message.role)}
        values |= self.said(self.content(message.content), thinking)
        if message.tool_call_id is not None:
            values["tool_call_id"] = message.tool_call_id
        name = message.name if message.tool_name is None else message.tool_name
        if name is not None:
            values["name"] = name
        if not message.tool_calls:
            return [values]
        if self.calls is CallsPlace.METADATA:
            turns = [_metadata_call(each.name, each.arguments) for each in message.tool_calls]
            return [values, *turns] if message.content or message.thinking else turns
        calls = [self.call(each.name, each.arguments, each.id) for each in message.tool_calls]
        if not self.calls_alone:
            return [values | {"tool_calls": calls}]
        in_content = self.thinking is not ThinkingPlace.FIELDS
        alone = {"role": message.role, "content": None, "tool_calls": calls}
        says = bool(message.content or (in_content and message.thinking))
        return [values, alone] if says else [values | alone]

    def role(self, role: str) -> str:
        return self.results or role if role == "tool" else role

    def said(self, content: str | list[Values] | None, thinking: str | None) -> Values:
        """The fields of a turn with this content and thinking."""
        if thinking is None:
            return {"content": content}
        if self.thinking is ThinkingPlace.FIELDS:
            return {"content": content, **dict.fromkeys(REASONING_KEYS, thinking)}
        if self.thinking is ThinkingPlace.BLOCKS:
            given = ("thoughts", thinking), ("response", content)
            return {"content": {"blocks": [{"type": t, "text": text} for t, text in given if text]}}
        if not thinking:
            return {"content": content}
        texts = text_parts(content) if content and isinstance(content, str) else content or ()
        return {"content": [{"type": "thinking", "thinking": thinking}, *texts]}

    def content(self, content: Content) -> str | list[Values]:
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

    def offered(
        self, messages: list[Values], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[list[Values], Values]:
        """The conversation and the variables with which the template gets the tools."""
        functions = [tool.get("function", tool) for tool in tools or ()]
        if self.tools is ToolsPlace.FUNCTIONS:
            return messages, {"functions": json.dumps(functions, indent=4)}
        if not tools or self.tools in (None, ToolsPlace.VARIABLE):
            return messages, {}
        first: Values = {"role": "system", "content": self.content("")}
        if messages and messages[0]["role"] == "system":
            first, *messages = messages
        if self.tools is ToolsPlace.SYSTEM_LIST:
            first = first | {"tools": list(tools)}
        elif self.tools is ToolsPlace.SYSTEM_JSON:
            first = first | {"tools": json.dumps(functions, ensure_ascii=False)}
        return [first, *messages], {}


def text_parts(text: str) -> list[Values]:
    return [{"type": "text", "text": text}]


def _metadata_call(name: str, arguments: Mapping[str, Any]) -> Values:
    content = json.dumps(dict(arguments), ensure_ascii=False)
    return {"role": "assistant", "metadata": name, "content": content}


def assumed_form(reads: Callable[..., bool]) -> MessageForm:
    """The most frequent form, for a template that is too slow for probes."""
    return MessageForm(
        tools=ToolsPlace.VARIABLE if reads("tools") else None,
        calls=CallsPlace.TOOL_CALLS if reads("tool_calls") else None,
    )


def found_form(
    render: FormRender, reads: Callable[..., bool], variables: frozenset[str]
) -> MessageForm:
    """The form that a template reads. `reads`: whether it reads one of some names; `variables`:
    those that it reads and never sets. Raises TemplateLimitError if a probe exceeds its limits."""
    form = MessageForm(parts=reads("type") and reads("text") and _wants_parts(render))
    places: list[ToolsPlace] = []
    if "functions" in variables and "tools" not in variables:
        places.append(ToolsPlace.FUNCTIONS)
    elif reads("tools"):
        places += (each for each in ToolsPlace if each is not ToolsPlace.FUNCTIONS)
    shown = (place for place in places if _shows_tools(render, replace(form, tools=place)))
    form = replace(form, tools=next(shown, None))
    form = _call_form(render, form, reads)
    return replace(form, thinking=_thinking_place(render, form, reads))


def _wants_parts(render: FormRender) -> bool:
    """Whether the template renders a text only as part of a list, as some templates with images
    do."""

    def shows(form: MessageForm) -> bool:
        return _PROBE in _rendered(render, form, [_turn(form, "user", _PROBE)], offer=False)

    return not shows(MessageForm()) and shows(MessageForm(parts=True))


def _shows_tools(render: FormRender, form: MessageForm) -> bool:
    """Whether the template shows tools, also in a conversation with a system message if it renders
    such."""
    alone = [_turn(form, "user", "Probe.")]
    found = _rendered(render, form, alone)
    printed = form.tools is ToolsPlace.SYSTEM_LIST and f"'name': '{PROBED_NAME}'" in found
    if PROBED_NAME not in found or printed:
        return False
    led = _rendered(render, form, [_turn(form, "system", _PROBE), *alone])
    return _PROBE not in led or PROBED_NAME in led


def _call_form(render: FormRender, form: MessageForm, reads: Callable[..., bool]) -> MessageForm:
    """The first form in which the template renders a call's arguments, other than as a Python dict,
    and a result, in order of frequency."""
    tried: list[MessageForm] = []
    if reads("tool_calls"):
        choices = product(("tool", "observation", None), (False, True), (False, True))
        tried = [
            replace(form, results=results, calls_alone=alone, arguments_as_json=as_json)
            for results, alone, as_json in choices
            if results != "observation" or reads(results)
        ]
    if reads("metadata"):  # ChatGLM's name of the role first
        metadata = replace(form, calls=CallsPlace.METADATA)
        tried += (replace(metadata, results=role) for role in ("observation", "tool", None))
    silent = replace(form, calls=None)
    tried += (replace(silent, results=role) for role in ("tool", "observation"))
    for each in tried:
        text = _rendered(render, each, _calling(each))
        if _PROBE in text and _RESULT in text and f"{{'{_KEY}'" not in text:
            return each
    return replace(silent, results=None)


def _thinking_place(
    render: FormRender, form: MessageForm, reads: Callable[..., bool]
) -> ThinkingPlace:
    """The first place from which the template renders thinking; fields if there is none."""

    def shows(place: ThinkingPlace) -> bool:
        placed = replace(form, thinking=place)
        answer = {"role": "assistant", **placed.said(form.content("Probe."), _THOUGHT)}
        talks = [[_turn(form, "user", "Probe."), answer]]
        if form.calls is CallsPlace.TOOL_CALLS:
            content = None if form.calls_alone else form.content("")
            talks.append(_calling(form, placed.said(content, _THOUGHT)))
        texts = [_rendered(render, form, talk) for talk in talks]
        printed = re.compile(f"['\"]{re.escape(_THOUGHT)}['\"]")  # as a value
        return any(_THOUGHT in text and not printed.search(text) for text in texts)

    places: list[ThinkingPlace] = []
    if reads("thinking") and reads("type"):
        places.append(ThinkingPlace.PARTS)
    if reads("blocks") and reads("thoughts"):
        places.append(ThinkingPlace.BLOCKS)
    if not places or shows(ThinkingPlace.FIELDS):
        return ThinkingPlace.FIELDS
    return next(filter(shows, places), ThinkingPlace.FIELDS)


def _turn(form: MessageForm, role: str, text: str) -> Values:
    return {"role": role, "content": form.content(text)}


def _calling(form: MessageForm, said: Values | None = None) -> list[Values]:
    """A conversation with a call and its result. `said`: further fields of the turn that calls."""
    id, arguments = "call00001", {_KEY: _PROBE}
    call = _turn(form, "assistant", _PROBE)
    if form.calls is CallsPlace.METADATA:
        call = _metadata_call(PROBED_NAME, arguments)
    elif form.calls is CallsPlace.TOOL_CALLS:
        call["content"] = None if form.calls_alone else form.content("")
        call["tool_calls"] = [form.call(PROBED_NAME, arguments, id)]
    result = _turn(form, "user", _RESULT)
    if form.results is not None:
        result |= {"role": form.results, "name": PROBED_NAME, "tool_call_id": id}
    return [
        _turn(form, "user", "Probe."),
        call | (said or {}),
        result,
        _turn(form, "assistant", "It is done."),
        _turn(form, "user", "Thanks."),
    ]


def _rendered(
    render: FormRender, form: MessageForm, messages: list[Values], *, offer: bool = True
) -> str:
    tools = [PROBED_TOOL] if offer else None
    return rendered(lambda *given: render(form, *given), messages, tools)


def rendered(render: Render, messages: list[Values], tools: list[Values] | None) -> str:
    """What a template renders of a probe; nothing if it refuses or fails. Raises
    TemplateLimitError."""
    try:
        return render(messages, tools)
    except TemplateLimitError:
        raise
    except RequestError:
        return ""

"""Conversations to prompts: the model file's own template, and tokens that a user cannot forge."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from model_zoo.chat.message_form import MessageForm, call_form, text_parts, wants_parts
from model_zoo.chat.sentinel import breaker, unused_sentinel, without_sentinel
from model_zoo.chat.template import Template
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.errors import RequestError

# A template may build control tokens from a role's name, so a user must not choose it freely.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

_MARKER = re.compile(r"<.+>|\[.+\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image among a message's texts: the bytes of its file."""

    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the assistant wants called; `arguments` are JSON values by name."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    `content`: a text, or texts and images in order. `thinking` and `tool_calls` belong to the
    assistant's turns; `tool_name` and `tool_call_id` tell which call a tool's turn answers. `name`
    tells participants of one role apart.
    """

    role: str
    content: str | tuple[str | ImagePart, ...] = ""
    thinking: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """All texts of the content, joined."""
        return "".join(part for part in self.content if isinstance(part, str))

    @property
    def images(self) -> tuple[ImagePart, ...]:
        return tuple(part for part in self.content if isinstance(part, ImagePart))


class ChatTemplate:
    """A Jinja chat template with the texts of the tokens that it may write.

    `inspected`: the constant texts that it looks for in messages. `names`: every variable,
    attribute and constant text that it reads. `form`: the form of messages that it reads.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self._template = Template(source)
        self.inspected = self._template.inspected
        self.names = self._template.names
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self.form = self._found_form()

    def reads(self, *names: str) -> bool:
        """Whether it reads one of `names`, as a variable, an attribute, a key or a text."""
        return not self.names.isdisjoint(names)

    @property
    def sees_images(self) -> bool:
        """Whether it looks for images among a message's texts."""
        return self.reads("image", "image_url")

    @property
    def takes_tools(self) -> bool:
        return self.reads("tools") or self._reads_functions

    @property
    def _reads_functions(self) -> bool:
        """Whether it wants tools as `functions`, a JSON text, as Firefunction does."""
        variables = self._template.variables
        return "functions" in variables and "tools" not in variables

    def _found_form(self) -> MessageForm:
        def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
            return self.render_values(messages, _given(tools, True))

        parts = self.reads("type") and self.reads("text") and wants_parts(render)
        return call_form(render, parts=parts) if self.reads("tool_calls") else MessageForm(parts)

    def values(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages as plain dicts, in the form that the template reads."""
        return [value for message in messages for value in self.form.values(message)]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text, to the letter as `transformers` renders it.

        `tools` are function schemas: `{"type": "function", "function": {"name": …}}`; some
        templates take None, for no tools, otherwise than an empty list. RequestError tells what
        the template refuses or stumbles over; what it merely leaves out `encode_chat` refuses.
        """
        return self.render_values(
            self.values(messages), {**variables, **_given(tools, add_generation_prompt)}
        )

    def render_values(
        self,
        messages: list[dict[str, Any]],
        variables: dict[str, Any],
        *,
        now: datetime | None = None,
    ) -> str:
        """`render` with the messages as the plain dicts that templates read.

        `now`: the time that it is, where the template asks; by default this machine's.
        """
        given = {"documents": None, **self._tokens, **variables, "messages": messages}
        return self._template.render(self._further(variables, now) | given, now=now)

    def _further(self, variables: Mapping[str, Any], now: datetime | None) -> dict[str, Any]:
        """What Firefunction's authors document as variables, where the template reads them."""
        further = {}
        if self._reads_functions:
            tools = variables.get("tools") or ()
            functions = [tool.get("function", tool) for tool in tools]
            further["functions"] = json.dumps(functions, indent=4)
        if "datetime" in self._template.variables:
            further["datetime"] = (now or datetime.now()).strftime("%Y-%m-%d %H:%M:%S")
        return further


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> list[int]:
    """Token ids of the conversation: control tokens only where the template puts them.

    A sentinel character goes into every control token's text, and every end of one, that stands
    in a message, a tool or a variable, so that the rendered text holds an unbroken one only where
    the template wrote it; the sentinel leaves before the pieces are encoded. Raises RequestError
    for a role that is none of `ROLES`, and for images, tools and their calls where the template
    does not look for any.
    """
    given = variables | _given(tools, add_generation_prompt)
    rendered = render_unforged(template, tokenizer, messages, given)
    return tokenizer.with_bos(tokenizer.encode_parts(rendered.cut(tokenizer)))


@dataclass(frozen=True, slots=True)
class Unforged:
    """A text with a sentinel in whatever looks like a special token and is none."""

    text: str
    sentinel: str = ""

    def cut(self, tokenizer: Tokenizer) -> list[str | int]:
        """The text without the sentinel, cut at its special tokens."""
        parts = tokenizer.cut(self.text, parse_special=True)
        return [p if isinstance(p, int) else without_sentinel(p, self.sentinel) for p in parts]


def render_unforged(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    variables: dict[str, Any],
    *,
    image: str | None = None,
    reserved: tuple[str, ...] = (),
    now: datetime | None = None,
) -> Unforged:
    """What `encode_chat` encodes; `variables` are those of a template, tools among them.

    `image`: what stands for an image where the template knows of none; it then gets texts alone.
    `reserved`: further texts that nobody may write but the template. `now` as in `render_values`.
    """
    for message in messages:
        if message.role not in ROLES:
            known = ", ".join(sorted(ROLES))
            raise RequestError(f'The role "{message.role}" is not one of {known}.')
    image = None if template.sees_images else image
    variables = _given(None, True) | variables
    _refuse_unsupported(template, messages, variables["tools"], blind=image is None)
    values = template.values(messages)
    breakable = _breakable_texts(template, tokenizer, reserved)
    given = [values, variables, template.source, breakable.control, breakable.wished]
    sentinel = unused_sentinel(given)
    rendered = _render_unforged(template, values, variables, breakable, sentinel, image, now)
    return Unforged(rendered, sentinel)


@dataclass(frozen=True, slots=True)
class _Breakable:
    """Which texts to break where.

    `control`: everywhere but in what the assistant said, `spoken`: there. It lacks the texts that
    the template looks for, such as `</think>`: templates cut old thoughts off at them.
    `markers`: user-defined tokens that the template writes itself, such as `<tool_call>`; they
    stay whole in what the assistant said. `wished`: those that the template also looks for, which
    stay whole wherever breaking them changes what is rendered. `kept`: what is a text or a token
    of its own, and not the beginning or end of another.
    """

    control: tuple[str, ...]
    spoken: tuple[str, ...]
    markers: tuple[str, ...]
    wished: tuple[str, ...]
    kept: frozenset[str]


def _breakable_texts(
    template: ChatTemplate, tokenizer: Tokenizer, reserved: tuple[str, ...]
) -> _Breakable:
    control, defined = tokenizer.vocabulary.control, tokenizer.vocabulary.user_defined
    decisive = tokenizer.end_tokens | {tokenizer.bos_id}
    spoken = [t for t, i in control.items() if i in decisive or t not in template.inspected]
    written = [text for text in defined if _MARKER.fullmatch(text) and text in template.source]
    return _Breakable(
        tuple(dict.fromkeys((*control, *reserved))),
        tuple(dict.fromkeys((*spoken, *reserved))),
        tuple(text for text in written if text not in template.inspected),
        tuple(text for text in written if text in template.inspected),
        template.inspected.union(defined),
    )


def _render_unforged(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    breakable: _Breakable,
    sentinel: str,
    image: str | None,
    now: datetime | None,
) -> str:
    def breaking(texts: tuple[str, ...]) -> Callable[[Any], Any]:
        chosen = breaker(texts, breakable.kept, template.names)
        return lambda value: value if chosen is None else chosen.broken(value, sentinel)

    spoken = breaking(breakable.spoken)

    def broken(texts: tuple[str, ...]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        given = breaking(texts)
        broken_messages = [
            _broken_message(message, given, spoken, image, parts=template.form.parts)
            for message in messages
        ]
        return broken_messages, {name: given(value) for name, value in variables.items()}

    needed = broken(breakable.control + breakable.markers)
    rendered = template.render_values(*needed, now=now)
    if not breakable.wished:
        return rendered
    wished = broken(breakable.control + breakable.markers + breakable.wished)
    if wished == needed:
        return rendered
    stricter = template.render_values(*wished, now=now)
    same = without_sentinel(stricter, sentinel) == without_sentinel(rendered, sentinel)
    return stricter if same else rendered


def _broken_message(
    message: dict[str, Any],
    given: Callable[[Any], Any],
    spoken: Callable[[Any], Any],
    image: str | None,
    *,
    parts: bool,
) -> dict[str, Any]:
    """Roles are no text of anybody's; what the assistant said may hold what templates look for."""
    said = spoken if message["role"] == "assistant" else given
    by_key = {"role": lambda role: role, "content": said}
    if image is not None and isinstance(message["content"], list):
        joined = _joined(message["content"], said, image)
        by_key["content"] = lambda _: text_parts(joined) if parts else joined
    return {key: by_key.get(key, given)(value) for key, value in message.items()}


def _joined(parts: list[dict[str, str]], broken: Callable[[Any], Any], image: str) -> str:
    """Texts and images as one text."""
    return "".join(broken(part["text"]) if part["type"] == "text" else image for part in parts)


def _refuse_unsupported(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    blind: bool,
) -> None:
    """What the template would leave out in silence, or print as Python does."""
    missing = []
    if tools and not template.takes_tools:
        missing.append("tools")
    if any(message.tool_calls for message in messages) and not template.reads("tool_calls"):
        missing.append("tool calls")
    if blind and any(message.images for message in messages) and not template.sees_images:
        missing.append("images")
    if missing:
        raise RequestError(
            f"The model's chat template does not support {' and '.join(missing)}; send the "
            "conversation without them or choose another model."
        )


def _given(
    tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
) -> dict[str, Any]:
    offered = None if tools is None else list(tools)
    return {"tools": offered, "add_generation_prompt": add_generation_prompt}

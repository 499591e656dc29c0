"""Renders conversations to prompts whose control tokens come from the template only."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from functools import partial
from typing import Any

from model_zoo.chat.control_token_guard import (
    control_token_guard,
    unused_sentinel,
    without_sentinel,
)
from model_zoo.chat.message_form import (
    IMAGE_TYPES,
    MessageForm,
    assumed_form,
    found_form,
    text_parts,
)
from model_zoo.chat.sandbox.frames import RenderLimits
from model_zoo.chat.template import Template
from model_zoo.chat.thinking import Efforts, ThinkingWords, found_efforts, found_words
from model_zoo.chat.turn_rules import TurnRules, turn_rules
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.errors import RequestError, TemplateLimitError

_log = logging.getLogger(__name__)

# Templates build control tokens from the role, so it must be one of these.
ROLES = frozenset({"system", "user", "assistant", "tool"})

# Limits of one of the forty renderings by which the form of messages, the rules of turns and the
# efforts of thinking are found. Published templates take a millisecond.
_PROBE_LIMITS = RenderLimits(seconds=0.2, memory_bytes=64 << 20, reply_bytes=1 << 18)
_MARKER = re.compile(r"<.+>|\[.+\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image of a message: the bytes of its file. `place`: the field of the client's request that
    it is from, for errors; None if unknown."""

    data: bytes = field(default=b"", repr=False)
    place: str | None = field(default=None, compare=False)


class ReplyStart(Enum):
    """What the prompt of a conversation ends with."""

    NEW = "new"  # the beginning of a new turn of the assistant
    CONTINUED = "continued"  # the last message, which is the beginning of the reply
    NONE = "none"  # the end of the last message


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call by the assistant; `arguments` are JSON values by name."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ImageTexts:
    """How the prompts of a family of models write images.

    `marker`: the text that its chat templates write for an image. `spelled`: the marker with the
    text that templates write around it, for templates without support for images; these get the
    parts of a message joined by `separator`. `reserved`: texts with a special meaning, which
    ordinary text must not contain. `writable`: texts of control tokens that belong to the text of
    requests and replies, such as those around places in an image.
    """

    marker: str
    spelled: str
    reserved: tuple[str, ...]
    separator: str = ""
    writable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    `content`: a text, or texts and images in order. `thinking` and `tool_calls` belong to the
    assistant's turns; `tool_name` and `tool_call_id` identify the call that a tool's turn answers.
    `name` distinguishes participants with the same role.
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
        if isinstance(self.content, str):
            return self.content
        return "".join(part for part in self.content if isinstance(part, str))

    @property
    def images(self) -> tuple[ImagePart, ...]:
        if isinstance(self.content, str):
            return ()
        return tuple(part for part in self.content if isinstance(part, ImagePart))


class ChatTemplate:
    """A Jinja chat template with the texts of the model's BOS and EOS.

    `inspected`: constant texts that it searches for in messages. `names`: the variables, attributes
    and constant texts that it reads. `form`: the form of messages and tools that it reads. `turns`:
    which turns it renders. `efforts`: the efforts of thinking that it accepts. `thinking_words`:
    the words in messages that switch thinking, if no variables do. `most`: upper limits of each
    rendering, as for `Template`.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        most: RenderLimits | None = None,
    ) -> None:
        self.source = source
        self._template = Template(source, most=most)
        self.inspected = self._template.inspected
        self.names = self._template.names
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self.form, self.turns, self.efforts = assumed_form(self.reads), TurnRules(), Efforts()
        self.thinking_words: ThinkingWords | None = None
        try:
            self.form = found_form(self._probed, self.reads, self._template.variables)
            self.turns = turn_rules(partial(self._probed, self.form), self.form, self.reads)
            self.efforts = found_efforts(partial(self._probed, self.form), self)
            self.thinking_words = found_words(partial(self._probed, self.form), self)
        except TemplateLimitError:
            _log.warning(
                "The chat template exceeds its limits on short conversations, so it gets all "
                "turns as they are."
            )

    def reads(self, *names: str) -> bool:
        """Whether it reads one of `names` as a variable, an attribute, a key or a text."""
        return not self.names.isdisjoint(names)

    @property
    def supports_images(self) -> bool:
        """Whether it renders images in messages."""
        return self.reads(*IMAGE_TYPES)

    @property
    def supports_suffix(self) -> bool:
        """Whether it renders a text to insert between `prompt` and `suffix`."""
        return {"prompt", "suffix"} <= self._template.variables

    @property
    def supports_tools(self) -> bool:
        """Whether it renders tools."""
        return self.form.tools is not None

    def _probed(
        self,
        form: MessageForm,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        **variables: Any,
    ) -> str:
        given = variables | _template_arguments(tools, True)
        return self.render_values(messages, given, most=_PROBE_LIMITS, form=form)

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
        """The prompt text, identical to that of `transformers`.

        `tools` are function schemas: `{"type": "function", "function": {"name": …}}`; some
        templates distinguish None from an empty list. RequestError if the template refuses the
        conversation or fails. Content that the template ignores is only refused by `encode_chat`.
        """
        return self.render_values(
            self.values(messages),
            {**variables, **_template_arguments(tools, add_generation_prompt)},
        )

    def render_values(
        self,
        messages: list[dict[str, Any]],
        variables: dict[str, Any],
        *,
        now: datetime | None = None,
        most: RenderLimits | None = None,
        form: MessageForm | None = None,
    ) -> str:
        """`render` with messages as dicts for the template.

        `now`: the time that the template sees, by default the local time. `most`: upper limits.
        `form`: another form of tools.
        """
        messages, further = (form or self.form).offered(messages, variables.get("tools"))
        if "datetime" in self._template.variables:  # as Firefunction documents it
            further["datetime"] = (now or datetime.now()).strftime("%Y-%m-%d %H:%M:%S")
        given = {"documents": None, **self._tokens, **variables, "messages": messages}
        return self._template.render(further | given, now=now, most=most)


@dataclass(frozen=True, slots=True)
class Unforged:
    """A rendered text in which a sentinel breaks up users' texts of special tokens."""

    text: str
    sentinel: str = ""

    @property
    def plain(self) -> str:
        """The text without the sentinel."""
        return without_sentinel(self.text, self.sentinel) if self.sentinel else self.text

    def cut(self, tokenizer: Tokenizer) -> list[str | int]:
        """The text cut at its special tokens, without the sentinel."""
        parts = tokenizer.cut(self.text, parse_special=True)
        return [p if isinstance(p, int) else without_sentinel(p, self.sentinel) for p in parts]


def render_unforged(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    variables: dict[str, Any],
    *,
    images: ImageTexts | None = None,
    continued: bool = False,
    now: datetime | None = None,
) -> Unforged:
    """Renders a conversation with special tokens only where the template writes them.

    `variables` are the template's, with tools. A sentinel character is inserted into texts of
    special tokens, and at their possible ends, in messages, tools and variables, so that the
    rendered text has an intact one only where the template wrote it. `Unforged.cut` removes it.
    Raises RequestError for a role not in `ROLES`, and for images, tools or tool calls that the
    template does not support.

    `images`: how images are written if the template does not support them; it then gets texts only.
    Only the template may write its reserved texts, and everyone its writable ones. `continued`: the
    text ends with that of the last message. `now`: as in `render_values`.
    """
    for message in messages:
        if message.role not in ROLES:
            known = ", ".join(sorted(ROLES))
            raise RequestError(f'The role "{message.role}" is not one of {known}.')
    breakable = _breakable_texts(template, tokenizer, images)
    images = None if template.supports_images else images
    variables = _template_arguments(None, True) | variables
    _refuse_unsupported(template, messages, variables["tools"], no_images=images is None)
    values = template.values(messages)
    given = [values, variables, template.source, breakable.control, breakable.inspected_markers]
    sentinel, end = unused_sentinel(given), ""
    if continued:
        end = unused_sentinel([*given, sentinel])
        values[-1]["content"] = _ended(values[-1]["content"], f"{end} ")
    needed, stricter = _broken(template, values, variables, breakable, sentinel, images)
    rendered = template.render_values(*needed, now=now)
    rendered = _before(end, rendered) if continued else rendered
    if stricter is not None:
        further = template.render_values(*stricter, now=now)
        further = _before(end, further) if continued else further
        same = without_sentinel(further, sentinel) == without_sentinel(rendered, sentinel)
        rendered = further if same else rendered
    return Unforged(rendered, sentinel)


def _ended(content: str | list[dict[str, str]], end: str) -> str | list[dict[str, str]]:
    """The content of a message, followed by the text `end`."""
    if isinstance(content, str):
        return content + end
    if content and content[-1]["type"] == "text":
        return [*content[:-1], *text_parts(content[-1]["text"] + end)]
    return [*content, *text_parts(end)]


def _before(end: str, rendered: str) -> str:
    """The text before `end`; without white space, as in `transformers`, if the template removes
    that of messages."""
    before, found, after = rendered.rpartition(end)
    if not found:
        raise RequestError(
            "The model's chat template does not show the end of the last message, so it cannot be "
            "continued; end the conversation with a message of the user."
        )
    before = before.replace(end, "")
    return before if after.startswith(" ") else before.rstrip()


@dataclass(frozen=True, slots=True)
class _Breakable:
    """The texts to break, by where they occur.

    `control`: broken everywhere except in assistant content. `in_assistant`: broken in assistant
    content; excludes texts that the template searches for, such as `</think>`, at which templates
    cut off reasoning. `markers`: user-defined tokens that the template writes, such as
    `<tool_call>`; not broken in assistant content. `inspected_markers`: markers that the template
    also searches for; not broken if that would change the result. `kept`: complete texts or tokens,
    which do not count as the beginning or end of others.
    """

    control: tuple[str, ...]
    in_assistant: tuple[str, ...]
    markers: tuple[str, ...]
    inspected_markers: tuple[str, ...]
    kept: frozenset[str]


def _breakable_texts(
    template: ChatTemplate, tokenizer: Tokenizer, images: ImageTexts | None
) -> _Breakable:
    reserved, writable = ((), ()) if images is None else (images.reserved, images.writable)
    control = {t: i for t, i in tokenizer.vocabulary.control.items() if t not in writable}
    defined = tokenizer.vocabulary.user_defined
    decisive = tokenizer.end_tokens | {tokenizer.bos_id}
    in_assistant = [t for t, i in control.items() if i in decisive or t not in template.inspected]
    written = [text for text in defined if _MARKER.fullmatch(text) and text in template.source]
    return _Breakable(
        tuple(dict.fromkeys((*control, *reserved))),
        tuple(dict.fromkeys((*in_assistant, *reserved))),
        tuple(text for text in written if text not in template.inspected),
        tuple(text for text in written if text in template.inspected),
        template.inspected.union(defined, writable),
    )


_Values = tuple[list[dict[str, Any]], dict[str, Any]]


def _broken(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    breakable: _Breakable,
    sentinel: str,
    images: ImageTexts | None,
) -> tuple[_Values, _Values | None]:
    """The messages and variables with the texts broken that must be; and, if that differs, with
    `inspected_markers` broken too."""

    def breaking(texts: tuple[str, ...]) -> Callable[[Any], Any]:
        chosen = control_token_guard(texts, breakable.kept, template.names)
        return lambda value: value if chosen is None else chosen.broken(value, sentinel)

    in_assistant = breaking(breakable.in_assistant)

    def broken(texts: tuple[str, ...]) -> _Values:
        given = breaking(texts)
        broken_messages = [
            _broken_message(message, given, in_assistant, images, parts=template.form.parts)
            for message in messages
        ]
        return broken_messages, {name: given(value) for name, value in variables.items()}

    needed = broken(breakable.control + breakable.markers)
    if not breakable.inspected_markers:
        return needed, None
    stricter = broken(breakable.control + breakable.markers + breakable.inspected_markers)
    return needed, None if stricter == needed else stricter


def _broken_message(
    message: dict[str, Any],
    given: Callable[[Any], Any],
    in_assistant: Callable[[Any], Any],
    images: ImageTexts | None,
    *,
    parts: bool,
) -> dict[str, Any]:
    """Breaks all values except for the role; assistant content with `in_assistant`."""
    said = in_assistant if message["role"] == "assistant" else given
    by_key = {"role": lambda role: role, "content": said}
    if images is not None and isinstance(message["content"], list):
        thoughts = [part for part in message["content"] if part["type"] == "thinking"]
        joined = _joined(message["content"][len(thoughts) :], said, images)
        texts = text_parts(joined) if parts or thoughts else joined
        by_key["content"] = lambda _: [*said(thoughts), *texts] if thoughts else texts
    return {key: by_key.get(key, given)(value) for key, value in message.items()}


def _joined(parts: list[dict[str, str]], broken: Callable[[Any], Any], images: ImageTexts) -> str:
    return images.separator.join(
        broken(part["text"]) if part["type"] == "text" else images.spelled for part in parts
    )


def _refuse_unsupported(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    no_images: bool,
) -> None:
    """Refuses content that the template would ignore, or print as Python values."""
    missing = []
    if tools and not template.supports_tools:
        missing.append("tools")
    if any(message.tool_calls for message in messages) and template.form.calls is None:
        missing.append("tool calls")
    if no_images and any(message.images for message in messages) and not template.supports_images:
        missing.append("images")
    if missing:
        raise RequestError(
            f"The model's chat template does not support {' and '.join(missing)}; send the "
            "conversation without them or choose another model."
        )


def _template_arguments(
    tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
) -> dict[str, Any]:
    offered = None if tools is None else list(tools)
    return {"tools": offered, "add_generation_prompt": add_generation_prompt}

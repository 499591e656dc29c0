"""Renders conversations to prompts whose control tokens come from the template only."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.control_token_guard import (
    control_token_guard,
    unused_sentinel,
    without_sentinel,
)
from model_zoo.chat.message_form import text_parts
from model_zoo.chat.messages import ROLES, ImageTexts, Message
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.errors import RequestError

_MARKER = re.compile(r"<.+>|\[.+\]", re.DOTALL)


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
    shows_images = template.supports_images or images is not None
    images = None if template.supports_images else images
    variables = {"tools": None, "add_generation_prompt": True} | variables
    _refuse_unsupported(template, messages, variables["tools"], shows_images=shows_images)
    values = template.values(messages)
    given = [values, variables, template.source, breakable.control, breakable.inspected_markers]
    sentinel, end = unused_sentinel(given), ""
    if continued:
        end = unused_sentinel([*given, sentinel])
        values[-1]["content"] = _ended(values[-1]["content"], f"{end} ")

    rendered = None
    for broken in _broken(template, values, variables, breakable, sentinel, images):
        text = template.render_values(*broken, now=now)
        text = _before(end, text) if continued else text
        same = without_sentinel(text, sentinel)
        if rendered is None or same == without_sentinel(rendered, sentinel):
            rendered = text
    assert rendered is not None
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
) -> list[_Values]:
    """The messages and variables with the texts broken that must be; and then, if that differs,
    with `inspected_markers` broken too."""

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
        return [needed]
    stricter = broken(breakable.control + breakable.markers + breakable.inspected_markers)
    return [needed] if stricter == needed else [needed, stricter]


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
    shows_images: bool,
) -> None:
    """Refuses content that the template would ignore, or print as Python values."""
    missing = []
    if tools and not template.supports_tools:
        missing.append("tools")
    if any(message.tool_calls for message in messages) and template.form.calls is None:
        missing.append("tool calls")
    if not shows_images and any(message.images for message in messages):
        missing.append("images")
    if missing:
        raise RequestError(
            f"The model's chat template does not support {' and '.join(missing)}; send the "
            "conversation without them or choose another model."
        )

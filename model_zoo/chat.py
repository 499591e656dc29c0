"""Conversations to prompts: the model file's own template, and tokens that a user cannot forge."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from model_zoo.sentinel import break_texts, unused_sentinel
from model_zoo.template import compile_template, inspected_texts, render_bounded
from model_zoo.tokenizer import Tokenizer
from runtime.errors import RequestError

# A template may build control tokens from a role's name, so a user must not choose it freely.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

_MARKER = re.compile(r"<.+>|\[.+\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


class ChatTemplate:
    """A Jinja chat template with the texts of the tokens that it may write.

    `inspected`: the constant texts that it looks for in messages.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self._template = compile_template(source)
        self.inspected = inspected_texts(source)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text; RequestError tells what the template refuses or stumbles over."""
        return self.render_values(
            [_as_values(message) for message in messages],
            {"add_generation_prompt": add_generation_prompt, **variables},
        )

    def render_values(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """`render` with the messages as the plain dicts that templates read."""
        absent: dict[str, Any] = {"tools": None, "documents": None}
        return render_bounded(
            self._template, {**absent, **self._tokens, **variables, "messages": messages}
        )


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> list[int]:
    """Token ids of the conversation: control tokens only where the template puts them.

    A sentinel character goes into every control token's text that stands in a message or a
    variable, so that the rendered text holds the unbroken text only where the template wrote it;
    the sentinel leaves before the pieces are encoded. The template sees the sentinel in those
    strings alone. Raises RequestError for a role that is none of `ROLES`.
    """
    for message in messages:
        if message.role not in ROLES:
            known = ", ".join(sorted(ROLES))
            raise RequestError(f'The role "{message.role}" is not one of {known}.')
    values = [_as_values(message) for message in messages]
    variables["add_generation_prompt"] = add_generation_prompt
    breakable = _breakable_texts(template, tokenizer)
    given = [values, variables, template.source, breakable.control, breakable.markers]
    sentinel = unused_sentinel(given)
    rendered = _render_unforged(template, values, variables, breakable, sentinel)
    parts = tokenizer.cut(rendered, parse_special=True)
    plain = (part if isinstance(part, int) else part.replace(sentinel, "") for part in parts)
    return tokenizer.with_bos(tokenizer.encode_parts(plain))


@dataclass(frozen=True, slots=True)
class _Breakable:
    """Which texts to break where.

    `control`: everywhere but in the assistant's turns, `spoken`: there. It lacks the texts that
    the template looks for, such as `</think>`: templates cut old thoughts off at them.
    `markers`: user-defined tokens that the template writes itself, such as `<tool_call>`; they
    stay whole in the assistant's turns, and wherever breaking them changes what is rendered.
    """

    control: tuple[str, ...]
    spoken: tuple[str, ...]
    markers: tuple[str, ...]


def _breakable_texts(template: ChatTemplate, tokenizer: Tokenizer) -> _Breakable:
    control = tokenizer.vocabulary.control
    decisive = tokenizer.end_tokens | {tokenizer.bos_id}
    spoken = (t for t, i in control.items() if i in decisive or t not in template.inspected)
    defined = (text for text in tokenizer.vocabulary.user_defined if _MARKER.fullmatch(text))
    markers = (text for text in defined if text in template.source)
    return _Breakable(tuple(control), tuple(spoken), tuple(markers))


def _render_unforged(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    breakable: _Breakable,
    sentinel: str,
) -> str:
    def broken(texts: tuple[str, ...]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        per_message = (
            breakable.spoken if message["role"] == "assistant" else texts for message in messages
        )
        pairs = zip(messages, per_message, strict=True)
        return (
            [break_texts(message, chosen, sentinel) for message, chosen in pairs],
            break_texts(variables, texts, sentinel),
        )

    needed = broken(breakable.control)
    rendered = template.render_values(*needed)
    wished = broken(breakable.control + breakable.markers)
    if wished == needed:
        return rendered
    stricter = template.render_values(*wished)
    same = stricter.replace(sentinel, "") == rendered.replace(sentinel, "")
    return stricter if same else rendered


def _as_values(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": message.content}

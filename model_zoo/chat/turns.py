"""Conversations in turns that a chat template renders: many refuse others, or drop their texts.

Which turns a template renders is found by rendering probes.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from hashlib import blake2b
from itertools import count, takewhile
from typing import TYPE_CHECKING

from model_zoo.chat.message_form import (
    PROBED_TOOL,
    REASONING_KEYS,
    SYSTEM_ROLES,
    MessageForm,
    Render,
    Values,
    rendered,
)

if TYPE_CHECKING:
    from model_zoo.chat.messages import ImagePart, Message, ToolCall

    Content = str | tuple[str | ImagePart, ...]

_BLANK_LINE = "\n\n"
_STRICT_ID = re.compile(r"[a-zA-Z0-9]{9}")  # of Mistral's templates
_STRICT_IDS = ("call00001", "call00002")
_OTHER_ID = "call_0123456789abcdef"


@dataclass(frozen=True, slots=True)
class TurnRules:
    """Which turns a template renders completely.

    `first_system`: a system message at the beginning; `later_systems`: further ones, at any place.
    `repeated_roles`: several turns of the user, or of the assistant, in a row.
    `users_after_results`: the user's turn after the result of a call. `several_calls`: of one turn.
    `free_ids`: ids of calls in any form; `no_ids`: calls without. `words_with_thinking`: both in a
    turn with calls.
    """

    first_system: bool = True
    later_systems: bool = True
    repeated_roles: bool = True
    users_after_results: bool = True
    several_calls: bool = True
    free_ids: bool = True
    no_ids: bool = True
    words_with_thinking: bool = True

    def adapted(self, messages: "Sequence[Message]") -> "Sequence[Message]":
        """The conversation with other turns in place of those that the template does not render.

        Texts keep their order, except for results of parallel calls.
        """
        if self == TurnRules():
            return messages
        messages = self._with_systems(messages)
        if not (self.several_calls and self.free_ids and self.no_ids):
            messages = _identified(messages, strict=not self.free_ids)
        if not self.several_calls:
            messages = list(_separated(messages))
        if not self.words_with_thinking:
            messages = [_with_words_as_thinking(message) for message in messages]
        turns: list[Message] = []
        for message in messages:
            if turns and self._must_join(turns[-1], message):
                turns[-1] = _joined(turns[-1], message)
            else:
                turns.append(message)
        return turns

    def _with_systems(self, messages: "Sequence[Message]") -> "Sequence[Message]":
        """System messages at the beginning are joined. Those that the template does not render
        become the user's, at their place, so that a conversation that grows keeps its prefix."""
        if self.later_systems:
            return messages
        leading = list(takewhile(lambda message: message.role in SYSTEM_ROLES, messages))
        first = [reduce(_joined, leading)] if leading else []
        kept = len(first) if self.first_system else 0
        others = [*first[kept:], *messages[len(leading) :]]
        return first[:kept] + [
            dataclasses.replace(each, role="user") if each.role in SYSTEM_ROLES else each
            for each in others
        ]

    def _must_join(self, before: "Message", message: "Message") -> bool:
        if message.role == "user" and before.role == "tool":
            return not self.users_after_results
        same = before.role == message.role and message.role in ("user", "assistant")
        return same and not self.repeated_roles and not before.tool_calls


def turn_rules(render: Render, form: MessageForm, *, calls: bool) -> TurnRules:
    """The rules of a template. `calls`: whether it reads calls of tools."""
    probes = _Probes(render, form)
    turn, shows = probes.turn, probes.shows
    user, reply, next_user = turn("user"), turn("assistant"), turn("user")
    if not shows(user, reply, next_user):  # such as a template of one turn
        return TurnRules()
    system = turn("system")
    rules = TurnRules(
        first_system=shows(system, user, reply, next_user),
        later_systems=shows(system, turn("system"), user, turn("system"), reply, next_user),
        repeated_roles=shows(user, turn("user"), reply, turn("assistant"), next_user),
    )
    return _with_call_rules(rules, probes) if calls else rules


def _with_call_rules(rules: TurnRules, probes: "_Probes") -> TurnRules:
    turn, calling, shows, accepts = probes.turn, probes.calling, probes.shows, probes.accepts
    first, second = _STRICT_IDS
    user, call, result = turn("user"), calling(first), turn("tool", tool_call_id=first)
    if not shows(user, call, result):
        return rules
    thinking = call.with_values(dict.fromkeys(REASONING_KEYS, "I think."))
    spoken = thinking.with_values({"content": probes.form.content("I say.")})
    both, other_result = calling(first, second), turn("tool", tool_call_id=second)
    return dataclasses.replace(
        rules,
        users_after_results=shows(user, call, result, turn("user")),
        several_calls=shows(user, both, result, other_result),
        free_ids=accepts(user, calling(_OTHER_ID), turn("tool", tool_call_id=_OTHER_ID)),
        no_ids=accepts(user, calling(None), turn("tool")),
        words_with_thinking=probes.form.calls_alone
        or not accepts(user, thinking, result)
        or accepts(user, spoken, result),
    )


@dataclass(frozen=True, slots=True)
class _Probe:
    """A turn, and its texts that a template must render."""

    values: Values
    texts: tuple[str, ...]

    def with_values(self, values: Values) -> "_Probe":
        return dataclasses.replace(self, values=self.values | values)


class _Probes:
    """Turns with distinct texts, and what a template renders of them."""

    def __init__(self, render: Render, form: MessageForm) -> None:
        self.form = form
        self._render = render
        self._numbers = count(10)

    def turn(self, role: str, **more: str) -> _Probe:
        text = self._text()
        name = {"name": PROBED_TOOL["function"]["name"]} if role == "tool" else {}
        return _Probe({"role": role, "content": self.form.content(text), **name, **more}, (text,))

    def calling(self, *ids: str | None) -> _Probe:
        """A turn of the assistant with a call for each id."""
        texts = tuple(self._text() for _ in ids)
        name = PROBED_TOOL["function"]["name"]
        calls = [
            self.form.call(name, {"city": text}, id) for text, id in zip(texts, ids, strict=True)
        ]
        content = None if self.form.calls_alone else self.form.content("")
        return _Probe({"role": "assistant", "content": content, "tool_calls": calls}, texts)

    def shows(self, *probes: _Probe) -> bool:
        """Whether the template renders all texts."""
        found = self._rendered(probes)
        return all(text in found for probe in probes for text in probe.texts)

    def accepts(self, *probes: _Probe) -> bool:
        return self._rendered(probes) != ""

    def _rendered(self, probes: Sequence[_Probe]) -> str:
        turns = [probe.values for probe in probes]
        calls = any("tool_calls" in values for values in turns)
        return rendered(self._render, turns, [PROBED_TOOL] if calls else None)

    def _text(self) -> str:
        return f"Probe {next(self._numbers)}."


def _identified(messages: "Sequence[Message]", *, strict: bool) -> "list[Message]":
    """The conversation with an id for each call, which its result has too. `strict`: of 9 letters
    and digits."""
    waiting: list[ToolCall] = []
    found = []
    for at, message in enumerate(messages):
        if message.tool_calls:
            waiting = [
                dataclasses.replace(call, id=_id(call.id or f"call{at:03}{number:02}", strict))
                for number, call in enumerate(message.tool_calls)
            ]
            message = dataclasses.replace(message, tool_calls=tuple(waiting))
        elif message.role == "tool":
            answered = _answered(message, waiting, strict)
            message = dataclasses.replace(message, tool_call_id=answered)
            waiting = [call for call in waiting if call.id != answered]
        found.append(message)
    return found


def _answered(result: "Message", waiting: "Sequence[ToolCall]", strict: bool) -> str | None:
    """The id of the call that `result` answers: without an id the first one, of the same name if
    there is one."""
    if result.tool_call_id is not None:
        return _id(result.tool_call_id, strict)
    same = [call for call in waiting if call.name == result.tool_name]
    return next((call.id for call in (*same, *waiting)), None)


def _id(given: str, strict: bool) -> str:
    if not strict or _STRICT_ID.fullmatch(given):
        return given
    return blake2b(given.encode(errors="surrogatepass"), digest_size=5).hexdigest()[:9]


def _separated(messages: "Sequence[Message]") -> "Iterator[Message]":
    """The conversation with a turn for each call, followed by its result. Calls have ids."""
    after = 0  # the place after the last results
    for at, message in enumerate(messages):
        if at < after:
            continue
        if len(message.tool_calls) < 2:
            yield message
            continue
        results = list(takewhile(lambda each: each.role == "tool", messages[at + 1 :]))
        after = at + 1 + len(results)
        for number, call in enumerate(message.tool_calls):
            turn = dataclasses.replace(message, tool_calls=(call,))
            yield dataclasses.replace(turn, content="", thinking=None) if number else turn
            yield from (each for each in results if each.tool_call_id == call.id)
        ids = {call.id for call in message.tool_calls}
        yield from (each for each in results if each.tool_call_id not in ids)


def _with_words_as_thinking(message: "Message") -> "Message":
    """The message; words beside thinking and calls become the end of the thinking."""
    words = message.content
    if not (message.tool_calls and message.thinking and words and isinstance(words, str)):
        return message
    thinking = f"{message.thinking}{_BLANK_LINE}{words}"
    return dataclasses.replace(message, content="", thinking=thinking)


def _joined(first: "Message", second: "Message") -> "Message":
    return dataclasses.replace(
        first,
        content=_joined_contents(first.content, second.content),
        thinking=_BLANK_LINE.join(filter(None, (first.thinking, second.thinking))) or None,
        tool_calls=first.tool_calls + second.tool_calls,
    )


def _joined_contents(first: "Content", second: "Content") -> "Content":
    """The contents with a blank line between their texts."""
    if not first or not second:
        return first or second
    *before, last = (first,) if isinstance(first, str) else first
    following, *after = (second,) if isinstance(second, str) else second
    if not (isinstance(last, str) and isinstance(following, str)):
        return (*before, last, following, *after)
    text = f"{last}{_BLANK_LINE}{following}"
    return (*before, text, *after) if before or after else text

"""Conversations in turns that a chat template renders: many refuse others, or drop their texts.

Which turns a template renders is found by rendering probes.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from hashlib import blake2b
from itertools import count, takewhile

from model_zoo.chat.message_form import (
    IMAGE_TYPES,
    PROBED_NAME,
    PROBED_TOOL,
    CallsPlace,
    MessageForm,
    Render,
    Values,
    rendered,
    text_parts,
)
from model_zoo.chat.messages import Content, ImagePart, Message, ToolCall

_BLANK_LINE = "\n\n"
_STRICT_ID = re.compile(r"[a-zA-Z0-9]{9}")  # of Mistral's templates
_STRICT_IDS = ("call00001", "call00002")
_OTHER_ID = "call_0123456789abcdef"
_SEPARATORS = ("", " ", ".")  # the shortest contents first


@dataclass(frozen=True, slots=True)
class TurnRules:
    """Which turns a template renders completely.

    Of the system: `first_system` at the beginning; `lone_system`: with nothing after it;
    `leading_systems`: several at the beginning; `later_systems`: at any place, in order.
    `users_keep_prefix`: a user's turn after a result leaves what is before it as it is, such as the
    thinking beside calls.
    Of users and assistants: `first_replies` at the beginning; `repeated_users` and
    `repeated_replies` in a row; `calls_after_replies` in a row; `users_after_results` of calls.
    `calls_alternate`: calls and results count where users and assistants must alternate.
    `user_separator` and `reply_separator`: the shortest turns that separate others; None where no
    others need it or none is rendered.
    Of calls: `several_calls` of one turn; `free_ids`: in any form; `no_ids`: none; `ids_pair`: the
    results of several calls are given to them by their ids, so that these must have some;
    `pictured_results`: with images;
    `words_with_calls`, `words_with_thinking`: in a turn with calls.
    """

    first_system: bool = True
    lone_system: bool = True
    leading_systems: bool = True
    later_systems: bool = True
    users_keep_prefix: bool = True
    first_replies: bool = True
    repeated_users: bool = True
    repeated_replies: bool = True
    calls_after_replies: bool = True
    users_after_results: bool = True
    calls_alternate: bool = True
    user_separator: str | None = None
    reply_separator: str | None = None
    several_calls: bool = True
    free_ids: bool = True
    no_ids: bool = True
    ids_pair: bool = False
    pictured_results: bool = True
    words_with_calls: bool = True
    words_with_thinking: bool = True

    def adapted(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The conversation with other turns in place of those that the template does not render,
        and with the names of the functions whose results it has.

        Texts keep their order, except for results of parallel calls and those with images.
        """
        messages = self._with_answers(messages)
        if self == TurnRules():
            return messages
        messages = self._with_systems(messages)
        if not self.pictured_results:
            messages = list(_with_images_after_results(messages))
        if not self.several_calls:
            messages = list(_separated(messages))
        if not self.words_with_thinking:
            messages = [_with_words_as_thinking(message) for message in messages]
        turns: list[Message] = []
        for message in messages:
            self._add(turns, message)
        return turns

    def _with_systems(self, messages: Sequence[Message]) -> list[Message]:
        """System messages at the beginning are joined. Those that the template does not render
        become the user's, at their place, so that a conversation that grows keeps its prefix."""
        turns = list(takewhile(lambda message: message.role == "system", messages))
        others = messages[len(turns) :]
        if turns and not self.leading_systems:
            turns = [reduce(_joined, turns)]
        if not (self.first_system if others else self.lone_system):
            turns = [_with_role(message, "user") for message in turns]
        for message in others:
            if message.role != "system" or self.later_systems:
                turns.append(message)
            elif turns and turns[-1].role == "tool" and not self.users_keep_prefix:
                turns[-1] = _appended(turns[-1], message)
            else:
                turns.append(_with_role(message, "user"))
        return turns

    def _add(self, turns: list[Message], message: Message) -> None:
        """Appends the message, joined with the last turn or separated from it where it must be."""
        if turns and self._must_join(turns[-1], message):
            turns[-1] = _joined(turns[-1], message)
            return
        if self._must_separate(turns, message):
            role, text = "user", self.user_separator
            if message.role == "user":
                role, text = "assistant", self.reply_separator
            if text is not None:
                turns.append(type(message)(role, text))
            elif turns and turns[-1].role == "tool":
                turns[-1] = _appended(turns[-1], message)
                return
        turns.append(message)

    def _must_join(self, before: Message, message: Message) -> bool:
        if before.role != message.role or before.tool_calls:
            return False
        if message.tool_calls:
            return not self.calls_after_replies and self.words_with_calls
        if message.role == "user":
            return not self.repeated_users
        return message.role == "assistant" and not self.repeated_replies

    def _must_separate(self, turns: Sequence[Message], message: Message) -> bool:
        if message.role not in ("user", "assistant"):
            return False
        if self.calls_alternate:
            before = next((t.role for t in reversed(turns) if t.role != "system"), None)
            if before is None:
                return message.role == "assistant" and not self.first_replies
            return (before, message.role) == ("tool", "user") and not self.users_after_results
        if message.tool_calls:
            return False
        spoken = (t.role for t in reversed(turns) if _speaks(t))
        return message.role == next(spoken, None if self.first_replies else "assistant")

    def _with_answers(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation in which results have the names, and the ids, of the calls that they
        answer. Ids take the form that the template demands. A call without one gets one where the
        template or `_separated` needs it."""
        known: dict[str, ToolCall] = {}  # calls by id
        waiting: list[ToolCall] = []  # calls of the last turn with calls
        found = []
        for at, message in enumerate(messages):
            if message.tool_calls:
                needed = self._needs_ids(len(message.tool_calls))
                waiting = [
                    self._with_id(call, f"call{at:03}{number:02}" if needed else None)
                    for number, call in enumerate(message.tool_calls)
                ]
                known |= {call.id: call for call in waiting if call.id is not None}
                message = dataclasses.replace(message, tool_calls=tuple(waiting))
            elif message.role == "tool":
                given = self._id(message.tool_call_id)
                call = _answered(given, message.tool_name or message.name, waiting)
                waiting = [each for each in waiting if each is not call]
                call = call or known.get(given or "")
                if call is not None:
                    name = message.tool_name or call.name
                    message = dataclasses.replace(message, tool_name=name)
                    given = given or call.id
                message = dataclasses.replace(message, tool_call_id=given)
            found.append(message)
        return found

    def _needs_ids(self, calls: int) -> bool:
        """Whether as many calls of one turn need ids."""
        several = calls > 1 and (self.ids_pair or not self.several_calls)
        return several or not self.no_ids

    def _with_id(self, call: ToolCall, otherwise: str | None) -> ToolCall:
        return dataclasses.replace(call, id=self._id(call.id or otherwise))

    def _id(self, given: str | None) -> str | None:
        if not given or self.free_ids or _STRICT_ID.fullmatch(given):
            return given or None
        return blake2b(given.encode(errors="surrogatepass"), digest_size=5).hexdigest()[:9]


def turn_rules(render: Render, form: MessageForm, reads: Callable[..., bool]) -> TurnRules:
    """The rules of a template. `reads`: whether it reads one of some names. Raises
    TemplateLimitError if a probe exceeds its limits."""
    probes = _Probes(render, form)
    if not probes.offer_tool_if_needed():  # such as a template of one turn
        return TurnRules()
    rules = _rules_without_calls(probes)
    calls = form.calls is CallsPlace.TOOL_CALLS
    return _with_call_rules(rules, probes, reads) if calls else rules


def _rules_without_calls(probes: "_Probes") -> TurnRules:
    turn, shows = probes.turn, probes.shows
    system, later = turn("system"), turn("system")
    user, reply, next_user = talk = turn("user"), turn("assistant"), turn("user")
    first_replies = shows(turn("assistant"), *talk)
    return TurnRules(
        first_system=shows(system, *talk),
        lone_system=shows(system),
        leading_systems=shows(system, later, *talk),
        later_systems=shows(system, user, later, reply, next_user, in_order=True),
        first_replies=first_replies,
        repeated_users=shows(user, turn("user"), reply, next_user),
        repeated_replies=shows(user, reply, turn("assistant"), next_user),
        user_separator=None if first_replies else probes.separator([], "user", reply, next_user),
    )


def _with_call_rules(rules: TurnRules, probes: "_Probes", reads: Callable[..., bool]) -> TurnRules:
    turn, calling, shows, accepts = probes.turn, probes.calling, probes.shows, probes.accepts
    first, second = _STRICT_IDS
    user, call, result = turn("user"), calling(first), turn("tool", tool_call_id=first)
    if not shows(user, call, result):
        return rules
    reply, next_user = turn("assistant"), turn("user")
    after_results, separator = shows(user, call, result, next_user), None
    if not after_results:
        separator = probes.separator([user, call, result], "assistant", next_user)
    separated = [] if separator is None else [probes.silent("assistant", separator)]
    thought, words = probes.text(), probes.text()
    form, silence = probes.form, call.values["content"]
    thinking = call.with_text(form.said(silence, thought), thought)
    content = {"content": form.content(words)}
    both_said = form.said(content["content"], thought)
    both, other_result = calling(first, second), turn("tool", tool_call_id=second)
    alone = form.calls_alone
    return dataclasses.replace(
        rules,
        # Some templates have the system message in the last turn if that is the user's.
        first_system=rules.first_system and shows(turn("system"), user, call, result),
        users_keep_prefix=probes.keeps([user, thinking, result], *separated, next_user),
        calls_after_replies=shows(user, reply, call, result),
        users_after_results=after_results,
        calls_alternate=after_results or not shows(user, reply, call, result, next_user),
        reply_separator=separator,
        several_calls=shows(user, both, result, other_result),
        free_ids=accepts(user, calling(_OTHER_ID), turn("tool", tool_call_id=_OTHER_ID)),
        no_ids=accepts(user, calling(None), turn("tool")),
        ids_pair=reads("tool_call_id"),
        pictured_results=not reads(*IMAGE_TYPES) or probes.pictures(user, call, result),
        words_with_calls=alone or shows(user, call.with_text(content, words), result),
        words_with_thinking=alone
        or not accepts(user, thinking, result)
        or accepts(user, thinking.with_text(both_said, words), result),
    )


@dataclass(frozen=True, slots=True)
class _Probe:
    """A turn, and its texts that a template must render."""

    values: Values
    texts: tuple[str, ...]

    def with_text(self, values: Values, text: str) -> "_Probe":
        return _Probe(self.values | values, (*self.texts, text))


class _Probes:
    """Turns with distinct texts, and what a template renders of them."""

    def __init__(self, render: Render, form: MessageForm) -> None:
        self.form = form
        self._render = render
        self._numbers = count(10)
        self._tools: list[Values] | None = None

    def offer_tool_if_needed(self) -> bool:
        """Whether the template renders a conversation. It is offered a tool from now on if it needs
        one."""
        talk = self.turn("user"), self.turn("assistant"), self.turn("user")
        if self.shows(*talk):
            return True
        self._tools = [PROBED_TOOL]
        return self.shows(*talk)

    def turn(self, role: str, **more: str) -> _Probe:
        text = self.text()
        named = {"name": PROBED_NAME} if role == "tool" else {}
        fields = {"role": self.form.role(role), "content": self.form.content(text)}
        return _Probe(fields | named | more, (text,))

    def calling(self, *ids: str | None) -> _Probe:
        """A turn of the assistant with a call for each id."""
        texts = tuple(self.text() for _ in ids)
        calls = [
            self.form.call(PROBED_NAME, {"city": text}, id)
            for text, id in zip(texts, ids, strict=True)
        ]
        content = None if self.form.calls_alone else self.form.content("")
        return _Probe({"role": "assistant", "content": content, "tool_calls": calls}, texts)

    def separator(self, before: Sequence[_Probe], role: str, *after: _Probe) -> str | None:
        """The shortest content of a turn with which the template renders all texts."""
        for text in _SEPARATORS:
            if self.shows(*before, self.silent(role, text), *after):
                return text
        return None

    def silent(self, role: str, text: str) -> _Probe:
        """A turn that the template need not show."""
        return _Probe({"role": role, "content": self.form.content(text)}, ())

    def keeps(self, before: Sequence[_Probe], *after: _Probe) -> bool:
        """Whether what the template renders of `before`, up to the last text, stays if the turns
        `after` follow."""
        begin, last, _ = self._rendered(before).partition(before[-1].texts[-1])
        return self._rendered((*before, *after)).startswith(begin + last)

    def shows(self, *probes: _Probe, in_order: bool = False) -> bool:
        """Whether the template renders all texts."""
        found = self._rendered(probes)
        places = [found.find(text) for probe in probes for text in probe.texts]
        return -1 not in places and (not in_order or places == sorted(places))

    def pictures(self, *probes: _Probe) -> bool:
        """Whether the template renders an image of the last turn, and not as JSON or as a value of
        Python."""
        *before, last = probes
        parts = text_parts(last.texts[0])
        plain, pictured = (
            self._rendered((*before, last.with_text({"content": content}, "")))
            for content in (parts, [*parts, {"type": "image"}])
        )
        printed = any(pictured.count(name) > plain.count(name) for name in ("'image'", '"image"'))
        return pictured not in ("", plain) and not printed

    def accepts(self, *probes: _Probe) -> bool:
        return self._rendered(probes) != ""

    def text(self) -> str:
        return f"Probe {next(self._numbers)}."

    def _rendered(self, probes: Sequence[_Probe]) -> str:
        turns = [probe.values for probe in probes]
        calls = any("tool_calls" in values for values in turns)
        return rendered(self._render, turns, [PROBED_TOOL] if calls else self._tools)


def _with_role(message: Message, role: str) -> Message:
    return dataclasses.replace(message, role=role)


def _speaks(message: Message) -> bool:
    return message.role == "user" or (message.role == "assistant" and not message.tool_calls)


def _answered(
    given: str | None, tool_name: str | None, waiting: Sequence[ToolCall]
) -> ToolCall | None:
    """The call that a result with the id `given` answers: without an id the first one, of the same
    name if there is one."""
    if given:
        return next((call for call in waiting if call.id == given), None)
    same = [call for call in waiting if call.name == tool_name]
    return next(iter((*same, *waiting)), None)


def _with_images_after_results(messages: Sequence[Message]) -> Iterator[Message]:
    """The conversation with the images of consecutive results in a turn of the user after them."""
    pictures: list[str | ImagePart] = []
    for message in messages:
        if message.role != "tool" and pictures:
            yield type(message)("user", tuple(pictures))
            pictures = []
        if message.role == "tool" and message.images:
            of = "" if message.tool_name is None else f" of {message.tool_name}"
            pictures += (f"[Images in the result{of}:]", *message.images)
            texts = [part for part in message.content if isinstance(part, str)]
            text = _BLANK_LINE.join(texts) or "[The images follow.]"
            message = dataclasses.replace(message, content=text)
        yield message
    if pictures:
        yield type(messages[-1])("user", tuple(pictures))


def _separated(messages: Sequence[Message]) -> Iterator[Message]:
    """The conversation with a turn for each call, followed by its result. Calls of one turn have
    ids, which need not differ."""
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
            for place, result in enumerate(results):
                if result.tool_call_id == call.id:
                    yield results.pop(place)
                    break
        yield from results


def _with_words_as_thinking(message: Message) -> Message:
    """The message; words beside thinking and calls become the end of the thinking."""
    words = message.content
    if not (message.tool_calls and message.thinking and words and isinstance(words, str)):
        return message
    thinking = f"{message.thinking}{_BLANK_LINE}{words}"
    return dataclasses.replace(message, content="", thinking=thinking)


def _appended(result: Message, message: Message) -> Message:
    """The tool's result, and the message under a label that tells it from the tool's words."""
    label = f"[The result ends here. Message of the {message.role}:]"
    labelled = _joined_contents(label, message.content)
    return dataclasses.replace(result, content=_joined_contents(result.content, labelled))


def _joined(first: Message, second: Message) -> Message:
    """The messages as one; the texts begin with the names of their authors if these differ."""
    if first.name != second.name:
        first, second = _with_name_in_text(first), _with_name_in_text(second)
    return dataclasses.replace(
        first,
        content=_joined_contents(first.content, second.content),
        thinking=_BLANK_LINE.join(filter(None, (first.thinking, second.thinking))) or None,
        tool_calls=first.tool_calls + second.tool_calls,
    )


def _with_name_in_text(message: Message) -> Message:
    if message.name is None:
        return message
    content = _joined_contents(f"{message.name}:", message.content)
    return dataclasses.replace(message, name=None, content=content)


def _joined_contents(first: Content, second: Content) -> Content:
    """The contents with a blank line between their texts."""
    if not first or not second:
        return first or second
    *before, last = (first,) if isinstance(first, str) else first
    following, *after = (second,) if isinstance(second, str) else second
    if not (isinstance(last, str) and isinstance(following, str)):
        return (*before, last, following, *after)
    text = f"{last}{_BLANK_LINE}{following}"
    return (*before, text, *after) if before or after else text

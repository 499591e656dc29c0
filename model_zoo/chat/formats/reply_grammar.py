"""Grammars of whole replies: thinking, then text of a required form, or tool calls.

They are llguidance's lists of grammars: the first one, in Lark, refers to the others by name.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from model_zoo.chat.formats import harmony
from model_zoo.chat.formats.call_forms import ID, CallForm, JsonCall, NamedCall
from model_zoo.chat.formats.tagged import ThinkingTags
from model_zoo.grammars.json_schema import compilable, rebased

ANSWER = "answer"
_TEXT = "TEXT: /(?s:.*)/"
# Text of a reply that does not begin like a JSON call.
_PLAIN = r"PLAIN: /[^\s\[{](?s:.*)/"
_BLANK = r"BLANK: /[ \n]{1,4}/"


@dataclass(frozen=True, slots=True)
class AllowedCalls:
    """Calls that a reply may have: the schema of the arguments by tool. `required`: nothing else
    may follow the thinking."""

    arguments: Mapping[str, Any]
    required: bool
    parallel: bool


@dataclass(slots=True)
class ReplyGrammar:
    """Collects the rules of one reply. `control`: ids of control tokens by text; a text with one of
    them is written with the token."""

    control: Mapping[str, int]
    rules: list[str] = field(default_factory=list)
    schemas: dict[str, Any] = field(default_factory=dict)

    def tagged(
        self,
        *,
        thinking: ThinkingTags | None,
        thinks: bool,
        answer: Mapping[str, Any] | None,
        calls: AllowedCalls | None,
        form: CallForm | None,
    ) -> str:
        """A reply with thinking between tags. `thinks`: it begins within thinking; None for
        `thinking`: it has none. `answer`: the grammar of the text; None if it is free."""
        body = self._body(answer, calls, form)
        if thinking is None:
            start = body
        else:
            thought = self._first("thought", f"TEXT {self._spelled(thinking.close)}")
            opened = "" if thinks else self._first("opening", self._spelled(thinking.open))
            start = f"({opened} {thought} BLANK?){'' if thinks else '?'} ({body})"
        return self._listed(start, answer)

    def harmony(self, answer: Mapping[str, Any] | None, calls: AllowedCalls | None) -> str:
        """A reply of messages in channels, after `<|start|>assistant`."""
        spelled = self._spelled
        next_one = spelled(f"{harmony.ENDS[0]}{harmony.START}assistant")
        message = spelled(harmony.MESSAGE)
        json_content = f"({spelled(' <|constrain|>json')} | {spelled(' json')})?"
        analysis = spelled(f"{harmony.CHANNEL}analysis")
        commentary = spelled(f"{harmony.CHANNEL}commentary")
        self.rules.append(f"analysis: {analysis} {message} TEXT {next_one}")
        before, options = "analysis*", []
        if calls is not None:
            self.rules.append(f"preamble: {commentary} {message} TEXT {next_one}")
            before = "(analysis | preamble)*"
            for name, reference in self._arguments(calls).items():
                recipient = spelled(f" to=functions.{name}")
                options.append(
                    f"({commentary} {recipient} | {recipient} {commentary}) {json_content} "
                    f"{message} {reference}"
                )
        if calls is None or not calls.required:
            final = spelled(f"{harmony.CHANNEL}final")
            content = "TEXT" if answer is None else f"@{ANSWER}"
            options.append(f"{final} {json_content} {message} {content}")
        return self._listed(f"{before} ({' | '.join(options)})", answer)

    def _body(
        self, answer: Mapping[str, Any] | None, calls: AllowedCalls | None, form: CallForm | None
    ) -> str:
        if calls is None:
            return "TEXT" if answer is None else f"@{ANSWER}"
        assert form is not None
        begin, rest = self._spelled(form.begin), self._calls(calls, form)
        if calls.required:
            return f"{begin} {rest}"
        if answer is not None:
            return f"@{ANSWER} | {begin} {rest}"
        if not begin:
            return f"{'PLAIN' if isinstance(form.call, JsonCall) else 'TEXT'} | {rest}"
        if "<[" in begin:
            return f"TEXT? ({begin} {rest})?"
        text = form.begin.strip()
        marker = self._first("marker", f"TEXT {self._spelled(text)}")
        return f"TEXT | {marker} {self._spelled(form.begin[len(text) :])} {rest}"

    def _calls(self, calls: AllowedCalls, form: CallForm) -> str:
        """The rules after `form.begin`."""
        if isinstance(form.call, JsonCall):
            self.schemas["calls"] = _call_schema(calls, form.call, listed=form.listed)
            one = "@calls"
        else:
            self.rules.append(f"call: {self._named(calls, form)}")
            one = "call"
        more = ""
        if calls.parallel and form.separator is not None:
            more = f"({self._spelled(form.separator)} {one})*"
        return f"{one} {more} {self._spelled(form.end)}"

    def _named(self, calls: AllowedCalls, form: CallForm) -> str:
        """Without `form.begin`, the name tells a call from text as soon as it is complete."""
        call, options = form.call, []
        assert isinstance(call, NamedCall)
        after = self._spelled(call.after)
        for index, (name, reference) in enumerate(self._arguments(calls).items()):
            opening = self._spelled(call.before + name + call.between)
            if call.identity:
                identity = f"({self._spelled(call.identity)} /{ID}/)?"
                named = self._spelled(call.before + name)
                opening = f"{named} {identity} {self._spelled(call.between)}"
            if not form.begin:
                opening = self._first(f"name_{index}", opening)
            options.append(f"{opening} {reference} {after}")
        return " | ".join(options)

    def _arguments(self, calls: AllowedCalls) -> dict[str, str]:
        """References to the grammars of the arguments, by tool."""
        references = {}
        for index, (name, schema) in enumerate(calls.arguments.items()):
            self.schemas[f"arguments_{index}"] = schema
            references[name] = f"@arguments_{index}"
        return references

    def _first(self, name: str, rule: str) -> str:
        """A reference to `rule`, which ends as soon as it matches and has precedence over free
        text. Control tokens are never part of free text."""
        lazy = "" if "<[" in rule else "[lazy]"
        self.rules.append(f"{name}{lazy}: {rule}")
        return name

    def _spelled(self, text: str) -> str:
        """Lark for exactly this text."""
        found = [marker for marker in self.control if marker in text]
        if not found:
            return json.dumps(text, ensure_ascii=False) if text else ""
        markers = "|".join(map(re.escape, sorted(found, key=len, reverse=True)))
        pieces = re.split(f"({markers})", text)
        return " ".join(
            f"<[{self.control[piece]}]>"
            if piece in self.control
            else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )

    def _listed(self, start: str, answer: Mapping[str, Any] | None) -> str:
        lark = "\n".join([f"start: {start}", *self.rules])
        terminals = [each for each in (_TEXT, _PLAIN, _BLANK) if each.partition(":")[0] in lark]
        main = {"lark_grammar": "\n".join([lark, *terminals])}
        others = [
            {"name": name, "json_schema": compilable(schema)}
            for name, schema in self.schemas.items()
        ]
        if answer is not None:
            others.append({**answer, "name": ANSWER})
        return json.dumps({"grammars": [main, *others]})


def _call_schema(calls: AllowedCalls, form: JsonCall, *, listed: bool) -> dict[str, Any]:
    """The schema of one call, or of a list of them."""
    names: Sequence[str] = tuple(calls.arguments)
    objects = []
    for index, name in enumerate(names):
        place = f"/anyOf/{index}/properties/{form.arguments}"
        arguments = rebased(calls.arguments[name], f"/items{place}" if listed else place)
        members = {**dict(form.first), form.name: {"const": name}, form.arguments: arguments}
        objects.append(
            {
                "type": "object",
                "properties": {**members, **dict(form.last)},
                "required": list(members),
                "additionalProperties": False,
            }
        )
    one = {"anyOf": objects}
    if not listed:
        return one
    most = {} if calls.parallel else {"maxItems": 1}
    return {"type": "array", "items": one, "minItems": 1, **most}

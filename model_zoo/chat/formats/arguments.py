"""How families write the arguments of a call, as grammars over a tool's JSON schema."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from model_zoo.chat.formats.lark import LINE_END, LarkGrammar, NoValue, Pieces, Unwritable
from model_zoo.chat.formats.members import Members, Names, besides, of_objects
from model_zoo.chat.formats.parameter_calls import CDATA, CDATA_END, Parameters
from model_zoo.chat.formats.plain_schemas import CONSTRAINTS
from model_zoo.chat.formats.schema_place import Place, Reading
from model_zoo.chat.formats.text_patterns import strings_of

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_INTEGER = "/-?(0|[1-9][0-9]{0,17})/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?/"
_NULLS = r"/\s*(null|None)\s*/"


class Arguments(Protocol):
    """A family's way of writing arguments."""

    def rule(self, lark: LarkGrammar, schema: Place) -> str:
        """Lark for the arguments that a schema allows. Raises Unwritable."""


class JsonArguments:
    """One JSON object."""

    def rule(self, lark: LarkGrammar, schema: Place) -> str:
        return lark.schema(schema)


def number(lark: LarkGrammar, place: Place, kind: str) -> str:
    """Lark for integers, or for any numbers, of a schema."""
    bounds = {key: place.schema[key] for key in _BOUNDS if key in place.schema}
    if bounds:
        return lark.schema(Place.whole({"type": kind, **bounds}), merged=True)
    return _INTEGER if kind == "integer" else _NUMBER


def times(rule: str, least: int, most: int | None) -> str:
    """Repetitions of a rule."""
    if most == 0:
        return ""
    return f"({rule}){{{least},{'' if most is None else most}}}"


def enumerated(lark: LarkGrammar, place: Place) -> list[Any]:
    """The values of `enum` or `const` that follow the schema."""
    values = [place.schema["const"]] if "const" in place.schema else place.schema["enum"]
    return values if len(CONSTRAINTS & place.schema.keys()) == 1 else lark.followed(place, values)


def texts_of(place: Place, reading: Reading) -> str | None:
    """A terminal expression for the texts of values that are read as texts; None if there are
    none."""
    strings, types = strings_of(place), place.types()
    if reading is not Reading.TEXT_OR_NULL:
        return strings
    texts = [] if strings is None else [f"(({strings}) & ~{_NULLS})"]
    texts += ['"null"'] if types is None or "null" in types else []
    return " | ".join(texts) or None


def sequence(place: Place, write: Callable[[Place], str], *, separator: str) -> str:
    """Lark for the items of an array. `write`: a function that returns Lark for one item."""
    first, rest = place.list_parts()
    least, most = place.schema.get("minItems", 0), place.schema.get("maxItems")
    written: list[str] = []
    further = None
    with suppress(NoValue):
        for part in first[:most]:
            written.append(write(part))
        if most is None or most > len(first):
            further = write(rest)
    if further is None:
        most = len(written)
    if most is not None and most < least:
        raise NoValue(place.pointer)
    tail, count = "", max(1, len(written))
    if further is not None:
        beyond = None if most is None else most - count
        tail = times(f"{separator} {further}", max(0, least - count), beyond)
        if not written:
            tail = f"{further} {tail}" if least else f"({further} {tail})?"
    for index, one in reversed([*enumerate(written)]):
        tail = f"{separator if index else ''} {one} {tail}"
        tail = f"({tail})?" if index >= least else tail
    return tail


_NAMES = Names(r"[^\s\"<>|]([^\"<>|\n]{0,98}[^\s\"<>|])?")


@dataclass(frozen=True, slots=True)
class ParameterArguments:
    """Arguments one by one between markers: texts verbatim, other values as JSON.

    `key_gap`, `value_gap`: texts after the markers of a key and of a value. `attributes`:
    attributes after a name, by the type of the value. `cdata`: texts may be CDATA sections.
    `literal`: another notation for values whose types are all in `literal_types`.
    """

    parameters: Parameters
    key_gap: Pieces = ()
    value_gap: Pieces = (LINE_END,)
    attributes: Mapping[str, str] = field(default_factory=dict)
    cdata: bool = False
    literal: "Arguments | None" = None
    literal_types: frozenset[str] = frozenset()

    def rule(self, lark: LarkGrammar, schema: Place) -> str:
        return of_objects(lark, schema, partial(self._members, lark, schema))

    def _members(self, lark: LarkGrammar, schema: Place, place: Place) -> str:
        """The arguments of one alternative of a schema."""
        members, written = Members.of(lark, place), []
        for name, part, required in members.declared:
            _NAMES.check(part, name)
            try:
                one = self._one(lark, name, part, schema.member(name))
            except NoValue:
                if required:
                    raise
                continue
            written.append(f"({one}){'' if required else '?'}")
        others, read = [], schema.member(None)
        for names, part in members.others:
            key = besides(_NAMES.among(names), schema.names() | members.names)
            if lark.allows(part, key):
                with suppress(Unwritable):
                    others.append(self._one(lark, None, part, read, lark.terminal(part, key)))
        if members.least and not others:
            raise lark.refusal(place, "this number of members cannot be enforced")
        if others:
            written.append(times(" | ".join(others), members.least, members.most))
        return lark.rule(" ".join(written) or '""')

    def _one(
        self, lark: LarkGrammar, name: str | None, place: Place, read: Place, key: str = ""
    ) -> str:
        """Lark for an argument called `name`, or whose name matches the terminal `key`. `read`: the
        schema that the parser uses for its value."""
        marks = self.parameters
        options = []
        for attribute, value in self._values(lark, place, read):
            after = (f"{attribute}{marks.key_end}", *self.key_gap, marks.value)
            if name is None:
                opening = f"{lark.spelled(marks.key)} {key} {lark.spelled(*after)}"
            else:
                opening = lark.spelled(f"{marks.key}{name}", *after)
            options.append(f"{opening} {value}")
        return f"({' | '.join(options)}) {lark.spelled(*self.value_gap)}"

    def _values(self, lark: LarkGrammar, place: Place, read: Place) -> list[tuple[str, str]]:
        """Pairs of the name's attributes and Lark for the value with its end."""
        line_end = "\n" if self.parameters.padded else ""
        end = self.parameters.value_end

        def json_of(place: Place) -> str:
            literal = self._literal(lark, place)
            value = f"{lark.schema(place, merged=bool(literal))} {literal}"
            return f"{lark.spelled(line_end)} ({value}) {lark.spelled(line_end + end)}"

        types, reading = place.types(), read.reading()
        if not self.attributes:
            if reading is Reading.JSON:
                return [("", json_of(place))]
            return [("", self._text(lark, place, reading))]
        found = {}
        for kind, attribute in self.attributes.items():
            if types is None or kind in types:
                is_text = kind == "string"
                text = self._text(lark, place, Reading.TEXT) if is_text else json_of(place)
                found[attribute] = text
        if not found:
            raise lark.refusal(place, "the schema allows no value")
        return list(found.items())

    def _literal(self, lark: LarkGrammar, place: Place) -> str:
        """The alternative to JSON, if there is one."""
        types, before = place.types(), len(lark.rules)
        if self.literal is None or types is None or types - self.literal_types:
            return ""
        if types == {"number"}:  # JSON and the other notation write numbers alike
            return ""
        try:
            return f"| {self.literal.rule(lark, place)}"
        except Unwritable:
            del lark.rules[before:]
            return ""

    def _text(self, lark: LarkGrammar, place: Place, reading: Reading) -> str:
        strings = texts_of(place, reading)
        if strings is None:
            raise lark.refusal(place, "the schema allows no text")
        line_end = "\n" if self.parameters.padded else ""
        end = self.parameters.value_end
        sections = (f'("{CDATA}" /(?s:.*)/)',)
        value = lark.until(place, strings, line_end + end, stop=end, without=sections)
        text = f"{lark.spelled(line_end)} {value}"
        if not self.cdata:
            return text
        section = lark.until(place, strings, CDATA_END)
        return f"({text} | {lark.spelled(CDATA)} {section} {lark.spelled(end)})"

"""How families write the arguments of a call, as grammars over a tool's JSON schema."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from model_zoo.chat.formats.lark import LINE_END, LarkGrammar, Pieces, Unwritable
from model_zoo.chat.formats.parameters import CDATA, CDATA_END, Parameters
from model_zoo.chat.formats.schema_place import MAX_DEPTH, Place, Reading
from model_zoo.chat.formats.text_patterns import refuse, strings_of
from model_zoo.grammars.json_schema import closed

# Whatever a schema demands by these is beyond grammars of names and values one by one.
UNSERVED = tuple(
    "not if dependentRequired dependentSchemas dependencies unevaluatedProperties "
    "patternProperties propertyNames minProperties maxProperties $dynamicRef $recursiveRef".split()
)
_COMBINED = ("allOf", "anyOf", "oneOf", "enum", "const")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
LIMITS = (*_BOUNDS, "minLength", "maxLength", "pattern", "format", "minItems", "maxItems")
_PARTS = ("items", "prefixItems", "properties", "required", "additionalProperties")
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


@dataclass(frozen=True, slots=True)
class Members:
    """The members of an object in the order of their declaration: name, schema, and whether it is
    required. `others`: the schema of members with other names; None: there are none."""

    declared: tuple[tuple[str, Place, bool], ...]
    others: Place | None

    @classmethod
    def of(cls, place: Place) -> "Members":
        place = _resolved(place)
        if not isinstance(place.schema, dict):
            return cls((), None if place.schema is False else Place(place.root, {}))
        refuse(place, (*UNSERVED, *_COMBINED))
        schema = closed(place.schema)
        required = list(schema.get("required", ()))
        further = schema.get("additionalProperties", True)
        others = None
        if isinstance(further, dict):
            others = place.part("additionalProperties")
        elif further is not False:
            others = Place(place.root, {})
        declared = [
            (name, place.part("properties", name), name in required)
            for name in schema.get("properties", {})
        ]
        for name in required:
            if name not in schema.get("properties", {}):
                if others is None:
                    raise Unwritable(place.pointer, f'"{name}" is required and not allowed')
                declared.append((name, others, True))
        return cls(tuple(declared), others)


def alternatives(place: Place) -> list[Place] | None:
    """The schemas of which a value must follow one, or the single one that this consists of; None
    if the schema does not combine others. Raises Unwritable."""
    combining = [each for each in ("$ref", "allOf", "anyOf", "oneOf") if each in place.schema]
    if not combining:
        return None
    refuse(place, (*LIMITS, *_PARTS, "type", "enum", "const", *combining[1:]))
    if combining == ["$ref"]:
        return [_target(place)]
    parts = place.options(combining[0])
    if combining == ["allOf"] and len(parts) > 1:
        raise Unwritable(place.pointer, '"allOf" of several schemas cannot be expressed there')
    return [part for part in parts if part.schema is not False]


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


def _target(place: Place) -> Place:
    target = place.target()
    if target is None:
        raise Unwritable(place.pointer, '"$ref" does not refer to a part of the schema')
    return target


def _resolved(place: Place) -> Place:
    for _ in range(MAX_DEPTH):
        if not isinstance(place.schema, dict) or "$ref" not in place.schema:
            return place
        refuse(place, (*UNSERVED, *_COMBINED, *_PARTS))
        place = _target(place)
    raise Unwritable(place.pointer, '"$ref" refers to itself')


@dataclass(frozen=True, slots=True)
class Names:
    """Names that can be written as they are: those that a regular expression matches."""

    regex: str

    def check(self, place: Place, name: str) -> None:
        """Raises Unwritable for the declared name of the part `place`."""
        if re.fullmatch(self.regex, name) is None:
            raise Unwritable(place.pointer, f'the name "{name[:80]}" cannot be written there')

    def besides(self, members: Members) -> str:
        """A terminal expression of the names that are not declared."""
        return f"/{self.regex}/{besides(members)}"


def besides(members: Members) -> str:
    """What excludes declared names from a terminal expression."""
    declared = [json.dumps(name, ensure_ascii=False) for name, _, _ in members.declared]
    return f" & ~({' | '.join(declared)})" if declared else ""


_NAMES = Names(r"[^\s\"<>|]([^\"<>|\n]{0,98}[^\s\"<>|])?")


@dataclass(frozen=True, slots=True)
class ParameterArguments:
    """Arguments one by one between markers: texts as they are, other values as JSON.

    `key_gap`, `value_gap`: after the markers of a key and of a value. `attributes`: what follows a
    name, by the type of the value. `cdata`: texts may be CDATA sections. `literal`: another way to
    write values all of whose types are in `literal_types`.
    """

    parameters: Parameters
    key_gap: Pieces = ()
    value_gap: Pieces = (LINE_END,)
    attributes: Mapping[str, str] = field(default_factory=dict)
    cdata: bool = False
    literal: "Arguments | None" = None
    literal_types: frozenset[str] = frozenset()

    def rule(self, lark: LarkGrammar, schema: Place) -> str:
        members = Members.of(schema)
        written = []
        for name, place, required in members.declared:
            _NAMES.check(place, name)
            written.append(f"({self._one(lark, name, place)}){'' if required else '?'}")
        if members.others is not None:
            name = lark.terminal(schema, _NAMES.besides(members))
            written.append(f"({self._one(lark, None, members.others, name)})*")
        return lark.rule(" ".join(written) or '""')

    def _one(self, lark: LarkGrammar, name: str | None, place: Place, key: str = "") -> str:
        """An argument called `name`, or one whose name is of the terminal `key`."""
        marks = self.parameters
        options = []
        for attribute, value in self._values(lark, place):
            after = (f"{attribute}{marks.key_end}", *self.key_gap, marks.value)
            if name is None:
                opening = f"{lark.spelled(marks.key)} {key} {lark.spelled(*after)}"
            else:
                opening = lark.spelled(f"{marks.key}{name}", *after)
            options.append(f"{opening} {value}")
        return f"({' | '.join(options)}) {lark.spelled(*self.value_gap)}"

    def _values(self, lark: LarkGrammar, place: Place) -> list[tuple[str, str]]:
        """Attributes of the name, with Lark for the value and its end."""
        line_end = "\n" if self.parameters.padded else ""
        end = self.parameters.value_end

        def json_of(place: Place) -> str:
            literal = self._literal(lark, place)
            value = f"{lark.schema(place, merged=bool(literal))} {literal}"
            return f"{lark.spelled(line_end)} ({value}) {lark.spelled(line_end + end)}"

        types, reading = place.types(), place.reading()
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
            raise Unwritable(place.pointer, "no value is allowed there")
        return list(found.items())

    def _literal(self, lark: LarkGrammar, place: Place) -> str:
        """The alternative to JSON, if there is one."""
        types, before = place.types(), len(lark.rules)
        if self.literal is None or types is None or types - self.literal_types:
            return ""
        if types == {"number"}:  # written alike
            return ""
        try:
            return f"| {self.literal.rule(lark, place)}"
        except Unwritable:
            del lark.rules[before:]
            return ""

    def _text(self, lark: LarkGrammar, place: Place, reading: Reading) -> str:
        strings = strings_of(place)
        if strings is None:
            raise Unwritable(place.pointer, "no text is allowed there")
        if reading is Reading.TEXT_OR_NULL:
            strings = f'(({strings}) & ~{_NULLS}) | "null"'
        line_end = "\n" if self.parameters.padded else ""
        end = self.parameters.value_end
        sections = (f'("{CDATA}" /(?s:.*)/)',)
        value = lark.until(place, strings, line_end + end, stop=end, without=sections)
        text = f"{lark.spelled(line_end)} {value}"
        if not self.cdata:
            return text
        section = lark.until(place, strings, CDATA_END)
        return f"({text} | {lark.spelled(CDATA)} {section} {lark.spelled(end)})"

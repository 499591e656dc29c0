"""Arguments as values of Python, or as Gemma 4 writes them: grammars over a tool's JSON schema."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from model_zoo.chat.formats import gemma4
from model_zoo.chat.formats.arguments import (
    LIMITS,
    UNSERVED,
    Members,
    Names,
    alternatives,
    besides,
    number,
    times,
)
from model_zoo.chat.formats.lark import LarkGrammar, Unwritable
from model_zoo.chat.formats.schema_place import Place, type_of
from model_zoo.chat.formats.text_patterns import ANY, refuse, strings_of

_TYPES = ("string", "number", "boolean", "null", "array", "object")
_OF_ARRAYS = ("contains", "uniqueItems", "additionalItems", "unevaluatedItems")
# Lark for the name of a member that is declared, or for that of any other one.
NameOf = Callable[[LarkGrammar, Place, str], str]
OtherName = Callable[[LarkGrammar, Place, Members], str]


@dataclass(frozen=True, slots=True)
class Notation:
    """How values are written. `string`: Lark for the strings of a terminal expression; `text`: for
    one string; `name`, `other`: for names of members; `constants`: for booleans and null.

    `separator`: between items; `colon`: between a name and its value. `by_name`: members are in the
    order of their names.
    """

    string: Callable[[LarkGrammar, Place, str], str]
    text: Callable[[LarkGrammar, Place, str], str]
    name: NameOf
    other: OtherName
    constants: Mapping[bool | None, str]
    separator: str
    colon: str
    by_name: bool = False


@dataclass(slots=True)
class ValueRules:
    """The rules of the values of one schema."""

    lark: LarkGrammar
    notation: Notation
    _names: dict[str, str] = field(default_factory=dict)

    def value(self, place: Place) -> str:
        """A reference to the rule of a part of the schema."""
        return self.lark.rule_of(place, self._names, self._options)

    def members(self, members: Members, name: NameOf, other: OtherName, colon: str) -> str:
        """The members of an object and their separators, in order."""
        separator = self.notation.separator
        declared = list(members.declared)
        if self.notation.by_name:
            declared.sort(key=lambda member: member[0].lower())
        # What may follow after something has been written, and before.
        after = before = '""'
        if members.others is not None:
            written = (
                f"{other(self.lark, members.others, members)} {colon} {self.value(members.others)}"
            )
            one = self.lark.rule(written)
            after, before = f"({separator} {one})*", f"({one} ({separator} {one})*)?"
        for key, place, required in reversed(declared):
            written = f"{name(self.lark, place, key)} {colon} {self.value(place)}"
            rest = self.lark.rule(after)
            one = self.lark.rule(f"{written} {rest}")
            before = one if required else f"{one} | {self.lark.rule(before)}"
            after = f"{separator} {one}" + ("" if required else f" | {rest}")
        return self.lark.rule(before)

    def _options(self, place: Place) -> list[str]:
        schema = place.schema
        if not isinstance(schema, dict):
            return []
        refuse(place, (*UNSERVED, *_OF_ARRAYS))
        parts = alternatives(place)
        if parts is not None:
            return [self.value(part) for part in parts]
        if "enum" in schema or "const" in schema:
            refuse(place, LIMITS)
            values = [schema["const"]] if "const" in schema else schema["enum"]
            types = place.types() or ()
            return [self._constant(place, each) for each in values if type_of(each) in types]
        kinds = schema.get("type", sorted(place.types() or _TYPES))
        listed = [kinds] if isinstance(kinds, str) else kinds
        return [each for kind in listed for each in self._of_type(kind, place)]

    def _of_type(self, kind: str, place: Place) -> list[str]:
        constants = self.notation.constants
        match kind:
            case "string":
                strings = strings_of(place)
                return [] if strings is None else [self.notation.string(self.lark, place, strings)]
            case "integer" | "number":
                return [number(self.lark, place, kind)]
            case "boolean":
                return [constants[True], constants[False]]
            case "null":
                return [constants[None]]
            case "array":
                return [f'"[" {self._array(place)} "]"']
            case "object":
                notation = self.notation
                names = (notation.name, notation.other, notation.colon)
                return [f'"{{" {self.members(Members.of(place), *names)} "}}"']
        return []

    def _array(self, place: Place) -> str:
        """The items of an array and their separators."""
        schema, separator = place.schema, self.notation.separator
        items = schema.get("items", True)
        if isinstance(items, list):
            raise Unwritable(place.pointer, '"items" with a list cannot be expressed there')
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        first = [self.value(part) for part in place.options("prefixItems")][:most]
        rest = ""
        if items is not False and (most is None or most > len(first)):
            one = self.value(place.part("items") if isinstance(items, dict) else _any(place))
            written = max(1, len(first))
            further = None if most is None else most - written
            rest = times(f"{separator} {one}", max(0, least - written), further)
            if not first:
                rest = f"{one} {rest}" if least else f"({one} {rest})?"
        for index, one in reversed([*enumerate(first)]):
            rest = f"{separator if index else ''} {one} {rest}"
            rest = f"({rest})?" if index >= least else rest
        return rest

    def _constant(self, place: Place, value: Any) -> str:
        notation = self.notation
        if value is None or isinstance(value, bool):
            return f"({notation.constants[value]})"
        if isinstance(value, str):
            return notation.text(self.lark, place, value)
        if isinstance(value, list):
            written = [self._constant(place, each) for each in value]
            return f'"[" {f" {notation.separator} ".join(written)} "]"'
        if isinstance(value, dict):
            keys = sorted(value, key=str.lower) if notation.by_name else list(value)
            written = [
                f"{notation.name(self.lark, place, key)} {notation.colon} "
                f"{self._constant(place, value[key])}"
                for key in keys
            ]
            return f'"{{" {f" {notation.separator} ".join(written)} "}}"'
        return json.dumps(json.dumps(value))


def _any(place: Place) -> Place:
    return Place(place.root, {})


class PythonArguments:
    """`key=value, …` with literals of Python, or of JSON, which models mix."""

    def rule(self, lark: LarkGrammar, schema: Place) -> str:
        rules = ValueRules(lark, _PYTHON)
        return rules.members(Members.of(schema), _keyword, _other_keyword, '"="')


@dataclass(frozen=True, slots=True)
class PythonLiteral:
    """One value as Python's `repr` writes it, whose strings and constants do not mix with JSON's.
    `stop`: what its strings do not contain."""

    stop: str

    def rule(self, lark: LarkGrammar, schema: Place) -> str:
        notation = replace(
            _PYTHON,
            string=partial(_literal_string, self.stop),
            other=partial(_other_literal_text, self.stop),
            constants={True: '"True"', False: '"False"', None: '"None"'},
        )
        return ValueRules(lark, notation).value(schema)


class GemmaArguments:
    """`{key:value,…}`, with strings between marks."""

    def rule(self, lark: LarkGrammar, schema: Place) -> str:
        rules = ValueRules(lark, _GEMMA)
        members = rules.members(Members.of(schema), _GEMMA.name, _GEMMA.other, _GEMMA.colon)
        return f'"{{" {members} "}}"'


_KEYWORDS = Names("[a-zA-Z0-9_]{1,64}")
_GEMMA_NAMES = Names(r"[^\s:{}\[\],<\"]([^:{}\[\],<\"\n]{0,98}[^\s:{}\[\],<\"])?")
_PYTHON_ESCAPE = r"\\([ntr\\'\"]|u([0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))"


def _keyword(lark: LarkGrammar, place: Place, name: str) -> str:
    _KEYWORDS.check(place, name)
    return lark.spelled(name)


def _other_keyword(lark: LarkGrammar, place: Place, members: Members) -> str:
    return lark.terminal(place, _KEYWORDS.besides(members))


def _python_string(lark: LarkGrammar, place: Place, strings: str) -> str:
    if strings == ANY:
        return lark.terminal(
            place, rf"/'([^'\\]|{_PYTHON_ESCAPE})*'|\"([^\"\\]|{_PYTHON_ESCAPE})*\"/"
        )
    return _quoted(lark, place, strings, r"\\")


def _literal_string(stop: str, lark: LarkGrammar, place: Place, strings: str) -> str:
    """In one line and without `stop`."""
    whole = f"~(/(?s:.*)/ {json.dumps(stop, ensure_ascii=False)} /(?s:.*)/)"
    if strings == ANY:
        plain = r"\\\r\n\x00"
        return lark.terminal(
            place,
            rf"/'([^'{plain}]|{_PYTHON_ESCAPE})*'|\"([^\"{plain}]|{_PYTHON_ESCAPE})*\"/ & {whole}",
        )
    return _quoted(lark, place, f"({strings}) & {whole}", r"\\\r\n\x00")


def _quoted(lark: LarkGrammar, place: Place, strings: str, refused: str) -> str:
    """Strings without escapes."""
    single, double = f"({strings}) & /[^'{refused}]*/", rf"({strings}) & /[^\"{refused}]*/"
    return lark.terminal(place, f'("\'" ({single}) "\'") | ("\\"" ({double}) "\\"")')


def _python_text(lark: LarkGrammar, place: Place, text: str) -> str:
    escaped = json.dumps(text, ensure_ascii=False)
    single = "'" + escaped[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"
    return f"({lark.spelled(escaped)} | {lark.spelled(single)})"


def _other_python_text(lark: LarkGrammar, place: Place, members: Members) -> str:
    return _python_string(lark, place, f"{ANY}{besides(members)}" if members.declared else ANY)


def _other_literal_text(stop: str, lark: LarkGrammar, place: Place, members: Members) -> str:
    return _literal_string(
        stop, lark, place, f"{ANY}{besides(members)}" if members.declared else ANY
    )


_PYTHON = Notation(
    string=_python_string,
    text=_python_text,
    name=_python_text,
    other=_other_python_text,
    constants={True: '"True" | "true"', False: '"False" | "false"', None: '"None" | "null"'},
    separator='"," " "?',
    colon='":" " "?',
)


def _gemma_string(lark: LarkGrammar, place: Place, strings: str) -> str:
    return f"{lark.spelled(gemma4.QUOTE)} {lark.until(place, strings, gemma4.QUOTE)}"


def _gemma_text(lark: LarkGrammar, place: Place, text: str) -> str:
    if gemma4.QUOTE in text:
        raise Unwritable(place.pointer, f"a text with {gemma4.QUOTE} cannot be written there")
    return lark.spelled(f"{gemma4.QUOTE}{text}{gemma4.QUOTE}")


def _gemma_name(lark: LarkGrammar, place: Place, name: str) -> str:
    try:
        _GEMMA_NAMES.check(place, name)
    except Unwritable:
        return _gemma_text(lark, place, name)
    return lark.spelled(name)


def _other_gemma_name(lark: LarkGrammar, place: Place, members: Members) -> str:
    return lark.terminal(place, _GEMMA_NAMES.besides(members))


_GEMMA = Notation(
    string=_gemma_string,
    text=_gemma_text,
    name=_gemma_name,
    other=_other_gemma_name,
    constants={True: '"true"', False: '"false"', None: '"null" | "None"'},
    separator='","',
    colon='":"',
    by_name=True,
)

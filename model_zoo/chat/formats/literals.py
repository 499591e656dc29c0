"""Arguments in Python's or Gemma's notation: grammars over a tool's JSON schema."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from model_zoo.chat.formats.arguments import enumerated, number, sequence, times
from model_zoo.chat.formats.lark import LarkGrammar, NoValue, Unwritable
from model_zoo.chat.formats.members import Members, Names, besides, of_objects
from model_zoo.chat.formats.plain_schemas import plain
from model_zoo.chat.formats.scanner import MAX_DEPTH, encoded
from model_zoo.chat.formats.schema_place import Place
from model_zoo.chat.formats.text_patterns import ANY, strings_of

_TYPES = ("string", "number", "boolean", "null", "array", "object")
# Functions that return Lark for the name of a declared member, and a terminal expression for other
# names.
NameOf = Callable[[LarkGrammar, Place, str], str]
OtherNames = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Notation:
    """How values are written. `string`: Lark for the strings that a terminal expression matches;
    `text`: for one string; `name`: for the name of a declared member; `others`: a terminal
    expression for other names; `constants`: Lark for booleans and null.

    `separator`: between items; `colon`: between a name and its value. `by_name`: members are sorted
    by name.
    """

    string: Callable[[LarkGrammar, Place, str], str]
    text: Callable[[LarkGrammar, Place, str], str]
    name: NameOf
    others: OtherNames
    constants: Mapping[bool | None, str]
    separator: str
    colon: str
    by_name: bool = False


@dataclass(slots=True)
class ValueRules:
    """The rules of the values of one schema."""

    lark: LarkGrammar
    notation: Notation
    _names: dict[str, str | None] = field(default_factory=dict)

    def value(self, place: Place, depth: int = 0) -> str:
        """A reference to the rule of a part of the schema, within `depth` lists and objects. Raises
        NoValue."""
        options = partial(self._options, depth)
        return self.lark.rule_of(place, f"{depth} {place.pointer}", self._names, options)

    def members(self, depth: int, place: Place, notation: Notation) -> str:
        """The members of an object and their separators, in order."""
        members, separator = Members.of(self.lark, place), notation.separator
        declared = list(members.declared)
        if notation.by_name:
            declared.sort(key=lambda member: member[0].lower())
        others = self._others(members, depth, notation)
        if members.least and not others:
            raise NoValue(place.pointer)
        # `after`, `before`: the remaining members if a member has been written already, and if not.
        after = before = '""'
        if others:
            least, most = members.least, members.most
            one = self.lark.rule(" | ".join(others))
            after = times(f"{separator} {one}", least, most)
            rest = times(f"{separator} {one}", 0, None if most is None else most - 1)
            before = f"{one} {rest}" if least else f"({one} {rest})?"
        for key, part, required in reversed(declared):
            try:
                value = self.value(part, depth)
            except NoValue:
                if required:
                    raise
                continue
            written = f"{notation.name(self.lark, part, key)} {notation.colon} {value}"
            rest = self.lark.rule(after)
            one = self.lark.rule(f"{written} {rest}")
            before = one if required else f"{one} | {self.lark.rule(before)}"
            after = f"{separator} {one}" + ("" if required else f" | {rest}")
        return self.lark.rule(before)

    def _others(self, members: Members, depth: int, notation: Notation) -> list[str]:
        """Lark for each kind of undeclared members."""
        found = []
        for names, part in members.others:
            key = notation.others(besides(names, members.names))
            try:
                value = self.value(part, depth)
            except NoValue:
                continue
            if self.lark.allows(part, key):
                found.append(f"{self.lark.terminal(part, key)} {notation.colon} {value}")
        return found

    def _options(self, depth: int, place: Place) -> list[str]:
        found = plain(place)
        if found != [place]:
            return [rule for part in found if (rule := self._value_or_none(part, depth))]
        schema = place.schema
        if "enum" in schema or "const" in schema:
            values = enumerated(self.lark, place)
            return [self._constant(place, each, depth) for each in values]
        kinds = schema.get("type", sorted(place.types() or _TYPES))
        listed = [kinds] if isinstance(kinds, str) else kinds
        return [each for kind in listed for each in self._of_type(kind, place, depth)]

    def _value_or_none(self, place: Place, depth: int) -> str | None:
        try:
            return self.value(place, depth)
        except NoValue:
            return None

    def _of_type(self, kind: str, place: Place, depth: int) -> list[str]:
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
            case "array" | "object" if depth < MAX_DEPTH:
                try:
                    return [self._container(kind, place, depth + 1)]
                except NoValue:
                    return []
        return []

    def _container(self, kind: str, place: Place, depth: int) -> str:
        if kind == "array":
            separator = self.notation.separator
            items = sequence(place, lambda part: self.value(part, depth), separator=separator)
            return f'"[" {items} "]"'
        return f'"{{" {self.members(depth, place, self.notation)} "}}"'

    def _constant(self, place: Place, value: Any, depth: int) -> str:
        notation = self.notation
        if isinstance(value, list | dict) and depth == MAX_DEPTH:
            raise Unwritable(place.pointer, f"a value nested more than {MAX_DEPTH} deep")
        if value is None or isinstance(value, bool):
            return f"({notation.constants[value]})"
        if isinstance(value, str):
            return notation.text(self.lark, place, value)
        if isinstance(value, list):
            written = [self._constant(place, each, depth + 1) for each in value]
            return f'"[" {f" {notation.separator} ".join(written)} "]"'
        if isinstance(value, dict):
            keys = sorted(value, key=str.lower) if notation.by_name else list(value)
            written = [
                f"{notation.name(self.lark, place, key)} {notation.colon} "
                f"{self._constant(place, value[key], depth + 1)}"
                for key in keys
            ]
            return f'"{{" {f" {notation.separator} ".join(written)} "}}"'
        return json.dumps(json.dumps(value))


class PythonArguments:
    """`key=value, …` with literals of Python or JSON, which models mix."""

    def rule(self, lark: LarkGrammar, schema: Place) -> str:
        rules = ValueRules(lark, _PYTHON)
        keywords = replace(_PYTHON, name=_keyword, others=_KEYWORDS.among, colon='"="')
        return of_objects(lark, schema, lambda place: rules.members(0, place, keywords))


@dataclass(frozen=True, slots=True)
class PythonLiteral:
    """One value as Python's `repr` writes it, not mixed with JSON's strings and constants. `stop`:
    a text that its strings do not contain."""

    stop: str

    def rule(self, lark: LarkGrammar, schema: Place) -> str:
        notation = replace(
            _PYTHON,
            string=partial(_literal_string, self.stop),
            others=partial(_literal_texts, self.stop),
            constants={True: '"True"', False: '"False"', None: '"None"'},
        )
        return ValueRules(lark, notation).value(schema)


@dataclass(frozen=True, slots=True)
class GemmaArguments:
    """`{key:value,…}`, with strings between the marks `quote`."""

    quote: str

    def rule(self, lark: LarkGrammar, schema: Place) -> str:
        notation = Notation(
            string=self._string,
            text=self._text,
            name=self._name,
            others=_GEMMA_NAMES.among,
            constants={True: '"true"', False: '"false"', None: '"null" | "None"'},
            separator='","',
            colon='":"',
            by_name=True,
        )
        rules = ValueRules(lark, notation)
        members = of_objects(lark, schema, lambda place: rules.members(0, place, notation))
        return f'"{{" {members} "}}"'

    def _string(self, lark: LarkGrammar, place: Place, strings: str) -> str:
        return f"{lark.spelled(self.quote)} {lark.until(place, strings, self.quote)}"

    def _text(self, lark: LarkGrammar, place: Place, text: str) -> str:
        if self.quote in text:
            raise Unwritable(place.pointer, f"a text with {self.quote} cannot be written")
        return lark.spelled(f"{self.quote}{text}{self.quote}")

    def _name(self, lark: LarkGrammar, place: Place, name: str) -> str:
        try:
            _GEMMA_NAMES.check(place, name)
        except Unwritable:
            return self._text(lark, place, name)
        return lark.spelled(name)


_KEYWORDS = Names("[a-zA-Z0-9_]{1,64}")
_GEMMA_NAMES = Names(r"[^\s:{}\[\],<\"]([^:{}\[\],<\"\n]{0,98}[^\s:{}\[\],<\"])?")
_OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
_PYTHON_ESCAPE = r"\\([ntr\\'\"]|u([0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))"


def _keyword(lark: LarkGrammar, place: Place, name: str) -> str:
    _KEYWORDS.check(place, name)
    return lark.spelled(name)


def _python_string(lark: LarkGrammar, place: Place, strings: str) -> str:
    """Where a schema restricts a string, JSON's notation has the escapes."""
    written = lark.terminal(place, _python_texts(strings))
    if strings == ANY:
        return written
    schema = {key: place.schema[key] for key in _OF_STRINGS if key in place.schema}
    return f"({written} | {lark.schema(Place.whole({'type': 'string', **schema}), merged=True)})"


def _python_texts(strings: str) -> str:
    if strings == ANY:
        return rf"/'([^'\\]|{_PYTHON_ESCAPE})*'|\"([^\"\\]|{_PYTHON_ESCAPE})*\"/"
    return _quoted(strings, r"\\")


def _literal_string(stop: str, lark: LarkGrammar, place: Place, strings: str) -> str:
    return lark.terminal(place, _literal_texts(stop, strings))


def _literal_texts(stop: str, strings: str) -> str:
    """Texts in one line and without `stop`."""
    whole = f"~(/(?s:.*)/ {encoded(stop)} /(?s:.*)/)"
    if strings == ANY:
        plain = r"\\\r\n\x00"
        return (
            rf"/'([^'{plain}]|{_PYTHON_ESCAPE})*'|\"([^\"{plain}]|{_PYTHON_ESCAPE})*\"/ & {whole}"
        )
    return _quoted(f"({strings}) & {whole}", r"\\\r\n\x00")


def _quoted(strings: str, refused: str) -> str:
    """Strings without escapes."""
    single, double = f"({strings}) & /[^'{refused}]*/", rf"({strings}) & /[^\"{refused}]*/"
    return f'("\'" ({single}) "\'") | ("\\"" ({double}) "\\"")'


def _python_text(lark: LarkGrammar, place: Place, text: str) -> str:
    escaped = encoded(text)
    single = "'" + escaped[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"
    return f"({lark.spelled(escaped)} | {lark.spelled(single)})"


_PYTHON = Notation(
    string=_python_string,
    text=_python_text,
    name=_python_text,
    others=_python_texts,
    constants={True: '"True" | "true"', False: '"False" | "false"', None: '"None" | "null"'},
    separator='"," " "?',
    colon='":" " "?',
)

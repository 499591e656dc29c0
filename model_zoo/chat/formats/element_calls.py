"""Calls of MiniMax M3, whose arguments are elements that are named like them and nested like their
values; the items of a list are elements called `item`. A marker precedes each tag."""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from model_zoo.chat.formats.arguments import sequence, texts_of
from model_zoo.chat.formats.calls import Calls
from model_zoo.chat.formats.lark import LarkGrammar, NoValue, Unwritable
from model_zoo.chat.formats.members import Members, Names, of_objects
from model_zoo.chat.formats.parameter_calls import reader_of
from model_zoo.chat.formats.plain_schemas import plain
from model_zoo.chat.formats.scanner import MAX_DEPTH, Malformed, Scanner, Steps, encoded
from model_zoo.chat.formats.schema_place import Place, Reading

MARK = "]<]minimax[>["
OPEN, CLOSE = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
BEGIN, NAME_END, END = f'{MARK}<invoke name="', '">', f"{MARK}</invoke>"
MARKERS = (OPEN, CLOSE, BEGIN, END)
_TAG, _ITEM = f"{MARK}<", "item"
_NAMES = Names(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")


def read(scanner: Scanner, calls: Calls) -> Steps[None]:
    """After `OPEN`: calls, and `CLOSE`, which may be missing."""
    yield from scanner.space()
    yield from scanner.expect(BEGIN)
    while True:
        name = yield from _up_to(scanner, NAME_END)
        calls.begin(name)
        yield from _read_arguments(scanner, calls, Place.whole(calls.tools.get(name, {})))
        yield from scanner.space()
        if (yield from scanner.closing((CLOSE, BEGIN))) != BEGIN:
            return


def _read_arguments(scanner: Scanner, calls: Calls, schema: Place) -> Steps[None]:
    separator = "{"
    while True:
        yield from scanner.space()
        yield from scanner.expect(_TAG)
        if not (yield from _opens(scanner, END)):
            break
        key = yield from _up_to(scanner, ">")
        calls.arguments(f"{separator}{encoded(key)}: ")
        place = schema.member(key)
        if place.reading() is Reading.TEXT and place.types():
            yield from _pass_text(scanner, calls, _closing(key))
        else:
            calls.arguments(encoded((yield from _read_value(scanner, place, key, 0))))
        separator = ", "
    calls.arguments("{}" if separator == "{" else "}")
    calls.end()


def _pass_text(scanner: Scanner, calls: Calls, closing: str) -> Steps[None]:
    """A value that is a text, as it arrives."""
    calls.arguments('"')
    ended = yield from scanner.until((closing,), lambda text: calls.arguments(encoded(text)[1:-1]))
    if ended is None:
        raise Malformed
    calls.arguments('"')


def _read_value(scanner: Scanner, place: Place, name: str, depth: int) -> Steps[Any]:
    """The value after an opening tag, with its closing tag. A value that may be a text is one,
    unless it begins with an element and its type is unknown."""
    types, pieces, ended = place.types(), list[str](), False
    if types is None or "string" not in types:
        pieces.append((yield from scanner.while_in(str.isspace)))
        if (yield from scanner.starts_with((_TAG,))) is not None:
            if (yield from _opens(scanner, _closing(name))):
                return (yield from _read_elements(scanner, place, _closing(name), depth + 1))
            ended = True
            if types in ({"array"}, {"object"}):
                return [] if types == {"array"} else {}
    if not ended and (yield from scanner.until((_closing(name),), pieces.append)) is None:
        raise Malformed
    text, convert = "".join(pieces), reader_of(place.reading())
    return text if convert is None else convert(text)


def _read_elements(scanner: Scanner, place: Place, closing: str, depth: int) -> Steps[Any]:
    """The elements of a value, after the marker of the first tag: a list or an object."""
    if depth > MAX_DEPTH:
        raise Malformed
    items: list[Any] = []
    members: dict[str, Any] = {}
    while True:
        name = yield from _up_to(scanner, ">")
        listed = name == _ITEM and not members
        part = _item(place, len(items)) if listed else place.member(name)
        value = yield from _read_value(scanner, part, name, depth)
        if listed:
            items.append(value)
        else:
            members[name] = value
        yield from scanner.space()
        yield from scanner.expect(_TAG)
        if not (yield from _opens(scanner, closing)):
            return members or items


def _item(place: Place, index: int) -> Place:
    first, rest = (place.target() or place).list_parts()
    return first[index] if index < len(first) else rest


def _opens(scanner: Scanner, closing: str) -> Steps[bool]:
    """Whether the tag whose beginning has been read opens an element; otherwise it is `closing`,
    which is consumed."""
    if (yield from scanner.peek()) != "/":
        return True
    yield from scanner.expect(closing.removeprefix(_TAG))
    return False


def _closing(name: str) -> str:
    return f"{MARK}</{name}>"


def _up_to(scanner: Scanner, marker: str) -> Steps[str]:
    pieces: list[str] = []
    if (yield from scanner.until((marker,), pieces.append)) is None:
        raise Malformed
    return "".join(pieces)


@dataclass(frozen=True, slots=True)
class ElementArguments:
    """`Arguments` as elements: texts verbatim, lists and objects nested, other values as JSON.
    Members that a schema does not declare are not written."""

    def rule(self, lark: LarkGrammar, schema: Place) -> str:
        return of_objects(lark, schema, partial(self._members, lark, schema))

    def _members(self, lark: LarkGrammar, schema: Place, place: Place) -> str:
        members, written = Members.of(lark, place), []
        if members.least:
            raise lark.refusal(place, "this number of members cannot be enforced")
        for name, part, required in members.declared:
            _NAMES.check(part, name)
            try:
                one = self._element(lark, name, part, schema.member(name))
            except NoValue:
                if required:
                    raise
                continue
            written.append(f"({one}){'' if required else '?'}")
        return lark.rule(" ".join(written) or '""')

    def _element(self, lark: LarkGrammar, name: str, place: Place, read: Place) -> str:
        """read: the schema that the parser uses for the value."""
        closing, opening = _closing(name), lark.spelled(f"{_TAG}{name}>")
        if read.reading() is not Reading.JSON:
            return f"{opening} {self._text(lark, place, read, closing)}"
        return f"{opening} {self._nested(lark, place, read)} {lark.spelled(closing)}"

    def _text(self, lark: LarkGrammar, place: Place, read: Place, closing: str) -> str:
        strings = texts_of(place, read.reading())
        if strings is None:
            raise lark.refusal(place, "the schema allows no text")
        elements = () if read.types() else (f"(/\\s*/ {encoded(_TAG)} /(?s:.*)/)",)
        return lark.until(place, strings, closing, without=elements)

    def _nested(self, lark: LarkGrammar, place: Place, read: Place) -> str:
        """As elements where the schema describes these, else as JSON."""
        before = len(lark.rules)
        with suppress(Unwritable):
            if place.types() == {"object"}:
                return of_objects(lark, place, partial(self._members, lark, read))
            if place.types() == {"array"}:
                options = [self._items(lark, each) for each in plain(place)]
                return lark.rule(" | ".join(options))
        del lark.rules[before:]
        return lark.schema(place)

    def _items(self, lark: LarkGrammar, place: Place) -> str:
        if place.schema.keys() & {"enum", "const", "uniqueItems", "contains"}:
            raise lark.refusal(place, "these items cannot be written as elements")
        return sequence(place, lambda item: self._element(lark, _ITEM, item, item), separator="")

"""Calls of MiniMax M3, whose arguments are elements that are named like them and nested like their
values; the items of a list are elements called `item`. A marker precedes each tag."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
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
_LEVELS = 8  # of lists and objects; grammars allow deeper values as JSON
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
    """The elements of a value, after the marker of the first tag: a list or an object. If the
    schema allows both, they are a list if all of them are items."""
    if depth > MAX_DEPTH:
        raise Malformed
    types, read = place.types() or {"array", "object"}, list[tuple[str, Any]]()
    listed = "array" in types or "object" not in types
    while True:
        name = yield from _up_to(scanner, ">")
        listed = listed and name == _ITEM
        part = place.item(len(read)) if listed else place.member(name)
        read.append((name, (yield from _read_value(scanner, part, name, depth))))
        yield from scanner.space()
        yield from scanner.expect(_TAG)
        if not (yield from _opens(scanner, closing)):
            return [value for _, value in read] if listed else dict(read)


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


class ElementArguments:
    """`Arguments` as elements: texts verbatim, lists and objects nested, other values as JSON.
    Members that a schema does not declare are not written."""

    def rule(self, lark: LarkGrammar, schema: Place) -> str:
        return of_objects(lark, schema, partial(_ElementRules(lark).members, schema, 0))


@dataclass(slots=True)
class _ElementRules:
    """The rules of the elements of one schema. `read`: the schema that the parser uses for a value;
    `depth`: how many lists and objects a value is in."""

    lark: LarkGrammar
    _names: dict[str, str | None] = field(default_factory=dict)

    def members(self, read: Place, depth: int, place: Place) -> str:
        members, written = Members.of(self.lark, place), []
        if members.least:
            raise self.lark.refusal(place, "this number of members cannot be enforced")
        for name, part, required in members.declared:
            _NAMES.check(part, name)
            try:
                one = self._element(name, part, read.member(name), depth)
            except NoValue:
                if required:
                    raise
                continue
            written.append(f"{self.lark.rule(one)}{'' if required else '?'}")
        return self.lark.rule(" ".join(written) or '""')

    def _element(self, name: str, place: Place, read: Place, depth: int) -> str:
        closing, opening = _closing(name), self.lark.spelled(f"{_TAG}{name}>")
        if read.reading() is not Reading.JSON:
            return f"{opening} {self._text(place, read, closing)}"
        return f"{opening} {self._nested(place, read, depth)} {self.lark.spelled(closing)}"

    def _text(self, place: Place, read: Place, closing: str) -> str:
        strings = texts_of(place, read.reading())
        if strings is None:
            raise self.lark.refusal(place, "the schema allows no text")
        elements = () if read.types() else (f"(/\\s*/ {encoded(_TAG)} /(?s:.*)/)",)
        return self.lark.until(place, strings, closing, without=elements)

    def _nested(self, place: Place, read: Place, depth: int) -> str:
        """As elements where the schema describes these, else as JSON."""
        kinds = {frozenset(("object",)): self._objects, frozenset(("array",)): self._lists}
        write = kinds.get(place.types() or frozenset())
        place, read = _resolved(place), _resolved(read)
        if write is not None and depth < _LEVELS:
            rules, names = len(self.lark.rules), len(self._names)
            key = f"{depth} {place.pointer} {read.pointer}"
            with suppress(Unwritable):
                return self.lark.rule_of(place, key, self._names, partial(write, read, depth + 1))
            del self.lark.rules[rules:]
            while len(self._names) > names:
                self._names.popitem()
        return self.lark.rule_of(place, place.pointer, self._names, self._json)

    def _json(self, place: Place) -> list[str]:
        return [self.lark.schema(place)]

    def _objects(self, read: Place, depth: int, place: Place) -> list[str]:
        return [of_objects(self.lark, place, partial(self.members, read, depth))]

    def _lists(self, read: Place, depth: int, place: Place) -> list[str]:
        first = [each.list_parts()[0] for each in plain(read)]
        if len(first) > 1 and any(first):
            raise self.lark.refusal(place, "the parser would confuse the items of several lists")
        return [self._items(read, depth, each) for each in plain(place)]

    def _items(self, read: Place, depth: int, place: Place) -> str:
        if place.schema.keys() & {"enum", "const", "uniqueItems", "contains"}:
            raise self.lark.refusal(place, "these items cannot be written as elements")
        places = (read.item(index) for index in count())
        return sequence(
            place, lambda item: self._element(_ITEM, item, next(places), depth), separator=""
        )


def _resolved(place: Place) -> Place:
    """The part that a schema without other keywords refers to, whose rules are written once."""
    alone = isinstance(place.schema, Mapping) and place.schema.keys() == {"$ref"}
    return (place.target() or place) if alone else place

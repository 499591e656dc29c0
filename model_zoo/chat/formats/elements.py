"""Arguments as XML elements, MiniMax M3's notation: grammars over a tool's JSON schema."""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from model_zoo.chat.formats.arguments import enumerated, number, sequence, texts_of, times
from model_zoo.chat.formats.lark import LarkGrammar, NoValue, Unwritable
from model_zoo.chat.formats.members import Members, Names, besides, of_objects
from model_zoo.chat.formats.minimax_m3 import ITEM, TAG, TOKEN
from model_zoo.chat.formats.plain_schemas import plain
from model_zoo.chat.formats.schema_place import Place, Reading
from model_zoo.chat.formats.source import MAX_DEPTH

_END = f"{TOKEN}</"
_NAMES = Names(r"[^\s<>\/]{1,100}")


class ElementArguments:
    """An element for each argument; items and members within are elements too."""

    def rule(self, lark: LarkGrammar, schema: Place) -> str:
        elements = _Elements(lark)
        return of_objects(lark, schema, lambda place: elements.members(place, schema, 0))


@dataclass(slots=True)
class _Elements:
    """The rules of the elements of one schema. `read`: the schema that the parser uses for a value;
    it may combine the schema that the value must follow with others."""

    lark: LarkGrammar
    _names: dict[str, str | None] = field(default_factory=dict)

    def members(self, place: Place, read: Place, depth: int, *, some: bool = False) -> str:
        """An element for each member of an object, in order; `some`: at least one."""
        members, written = Members.of(self.lark, place), []
        for name, part, required in members.declared:
            _NAMES.check(part, name)
            if depth and name == ITEM:
                raise Unwritable(part.pointer, f'the name "{name}" is that of items of lists')
            tag = json.dumps(name, ensure_ascii=False)
            try:
                written.append((self._element(tag, part, read.member(name), depth), required))
            except NoValue:
                if required:
                    raise
        others = " | ".join(self._others(members, read, depth))
        if members.least and not others:
            raise NoValue(place.pointer)
        rest = times(others, members.least, members.most) if others else '""'
        least_one = times(others, 1, members.most) if others else ""
        for one, required in reversed(written):
            rest = self.lark.rule(rest)
            begun = f"{one} {rest}"
            either = f"{begun} | {self.lark.rule(least_one)}" if least_one else begun
            least_one = begun if required else either
            rest = begun if required else f"({one})? {rest}"
        if some and not least_one:
            raise NoValue(place.pointer)
        return self.lark.rule(least_one if some else rest)

    def _others(self, members: Members, read: Place, depth: int) -> list[str]:
        """Lark for an element of each kind of undeclared members."""
        known = read.names() | members.names | ({ITEM} if depth else set())
        found = []
        for names, part in members.others:
            tag = besides(_NAMES.among(names), known)
            if self.lark.allows(part, tag):
                tag = self.lark.terminal(part, tag)
                with suppress(Unwritable):
                    found.append(self._element(tag, part, read.member(None), depth))
        return found

    def _element(self, name: str, place: Place, read: Place, depth: int) -> str:
        """`name`: Lark for the tag's name."""
        content = self._content(place, read, depth)
        return f'{self.lark.spelled(TAG)} {name} ">" {content} {name} ">"'

    def _content(self, place: Place, read: Place, depth: int) -> str:
        """A reference to the content of an element and the beginning of its end tag."""
        read, leaves = read.referred(), plain(place)
        place = leaves[0] if len(leaves) == 1 else place
        key = json.dumps([depth, place.pointer, read.pointer])
        return self.lark.rule_of(place, key, self._names, partial(self._options, read, depth))

    def _options(self, read: Place, depth: int, place: Place) -> list[str]:
        reading, options = read.reading(), []
        if reading is not Reading.JSON:
            texts = texts_of(place, reading)
            options += [] if texts is None else [self.lark.until(place, texts, _END, stop=TAG)]
        leaves, end = plain(place), self.lark.spelled(_END)
        if reading is Reading.JSON:
            scalars = [each for leaf in leaves for each in self._scalars(leaf)]
            options += [f"{each} {end}" for each in scalars]
        if depth + 1 == MAX_DEPTH:
            return options
        types = read.types() or frozenset()
        # An empty element is read as a list if the schema allows one.
        blank = "array" if "array" in types else "object"
        for leaf in leaves:
            if "enum" in leaf.schema or "const" in leaf.schema:
                continue
            for kind in ("array", "object"):
                if kind in (leaf.types() or (kind,)):
                    empty = reading is Reading.JSON and kind == blank
                    write = self._array if kind == "array" else self.members
                    with suppress(NoValue):
                        options.append(f"{write(leaf, read, depth + 1, some=not empty)} {end}")
        containers = {"array", "object"}
        if not options and not any(containers & (leaf.types() or containers) for leaf in leaves):
            raise self.lark.refusal(place, "its values cannot be distinguished from texts")
        return options

    def _array(self, place: Place, read: Place, depth: int, *, some: bool) -> str:
        def item(part: Place, index: int) -> str:
            return self._element(f'"{ITEM}"', part, read.item(index), depth)

        return self.lark.rule(sequence(place, item, least=int(some)) or '""')

    def _scalars(self, place: Place) -> list[str]:
        """Lark for the values that are written as JSON scalars."""
        if "enum" in place.schema or "const" in place.schema:
            values = enumerated(self.lark, place)
            texts = [json.dumps(each, ensure_ascii=False) for each in values]
            return [self.lark.spelled(text) for text in texts if TAG not in text]
        types, kinds = place.types(), place.schema.get("type", ())
        listed = [kinds] if isinstance(kinds, str) else kinds
        found = [number(self.lark, place, kind) for kind in listed if kind in ("integer", "number")]
        if types is not None:
            found += ['"true"', '"false"'] if "boolean" in types else []
            found += ['"null"'] if "null" in types else []
        return found

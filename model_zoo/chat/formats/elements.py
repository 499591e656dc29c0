"""Arguments as XML elements, as MiniMax M3 writes them: grammars over a tool's JSON schema."""

import json
from dataclasses import dataclass, field

from model_zoo.chat.formats.arguments import UNSERVED, Members, Names, alternatives, number, times
from model_zoo.chat.formats.lark import LarkGrammar, Unwritable
from model_zoo.chat.formats.minimax_m3 import ITEM, TAG, TOKEN
from model_zoo.chat.formats.schema_place import MAX_DEPTH, MAX_PARTS, Place, Reading
from model_zoo.chat.formats.text_patterns import refuse, strings_of

_END = f"{TOKEN}</"
_NAMES = Names(r"[^\s<>\/]{1,100}")
_OF_ARRAYS = ("contains", "uniqueItems", "additionalItems", "unevaluatedItems", "prefixItems")


class ElementArguments:
    """An element for each argument, in which items and members are elements again."""

    def rule(self, lark: LarkGrammar, schema: Place) -> str:
        return _Elements(lark).members(Members.of(schema), nested=False)


@dataclass(slots=True)
class _Elements:
    """The rules of the elements of one schema."""

    lark: LarkGrammar
    _names: dict[str, str] = field(default_factory=dict)

    def members(self, members: Members, *, nested: bool) -> str:
        """An element for each member of an object, in order."""
        written = []
        for name, place, required in members.declared:
            _NAMES.check(place, name)
            if nested and name == ITEM:
                raise Unwritable(place.pointer, f'the name "{name}" is that of items of lists')
            one = self._element(json.dumps(name, ensure_ascii=False), place)
            written.append(f"({one}){'' if required else '?'}")
        if members.others is not None:
            names = _NAMES.besides(members) + (f' & ~"{ITEM}"' if nested else "")
            written.append(
                f"({self._element(self.lark.terminal(members.others, names), members.others)})*"
            )
        return self.lark.rule(" ".join(written) or '""')

    def _element(self, name: str, place: Place) -> str:
        """`name`: Lark for the tag's name."""
        return f'{self.lark.spelled(TAG)} {name} ">" {self._content(place)} {name} ">"'

    def _content(self, place: Place) -> str:
        """A reference to the content of an element and the beginning of its end tag."""
        return self.lark.rule_of(place, self._names, self._options)

    def _options(self, place: Place) -> list[str]:
        reading, types = place.reading(), place.types()
        leaves = _leaves(place, 0, [MAX_PARTS])
        strings = None if reading is Reading.JSON else strings_of(place)
        options = [] if strings is None else [self.lark.until(place, strings, _END, stop=TAG)]
        if reading is Reading.TEXT_OR_NULL:
            options.append(self.lark.spelled(f"null{_END}"))
        end = self.lark.spelled(_END)
        if reading is Reading.JSON:
            scalars = [each for leaf in leaves for each in _scalars(self.lark, leaf)]
            options += [f"{each} {end}" for each in scalars]
        for kind in ("array", "object"):
            found = [leaf for leaf in leaves if kind in (leaf.types() or ("array", "object"))]
            both = types is not None and {"array", "object"} <= types
            if len(found) > 1 or (found and both):
                raise Unwritable(place.pointer, "several kinds of elements cannot be told apart")
            for leaf in found:
                empty = reading is Reading.JSON
                inner = self._array(leaf, empty) if kind == "array" else self._object(leaf, empty)
                options.append(f"{inner} {end}")
        return options

    def _array(self, place: Place, may_be_empty: bool) -> str:
        refuse(place, (*_OF_ARRAYS, "enum", "const"))
        schema = place.schema
        items = schema.get("items", True)
        if not isinstance(items, dict | bool):
            raise Unwritable(place.pointer, '"items" with a list cannot be expressed there')
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        within = place.part("items") if "items" in schema else Place(place.root, {})
        if items is False or most == 0:
            return '""'
        return times(self._element(f'"{ITEM}"', within), max(least, 1 - may_be_empty), most)

    def _object(self, place: Place, may_be_empty: bool) -> str:
        members = Members.of(place)
        if not may_be_empty and not any(required for _, _, required in members.declared):
            if place.pointer != "any":
                raise Unwritable(place.pointer, "text beside objects cannot be expressed there")
            return f"({self.members(members, nested=True)})"
        return self.members(members, nested=True)


def _leaves(place: Place, depth: int, budget: list[int]) -> list[Place]:
    """The schemas of which a value follows one."""
    if place.schema is False:
        return []
    if not isinstance(place.schema, dict):
        return [Place(place.root, {})]
    refuse(place, UNSERVED)
    parts = alternatives(place)
    if parts is None:
        return [place]
    budget[0] -= 1
    if depth > MAX_DEPTH or budget[0] < 0:
        raise Unwritable(place.pointer, "too many schemas refer to each other")
    return [leaf for part in parts for leaf in _leaves(part, depth + 1, budget)]


def _scalars(lark: LarkGrammar, place: Place) -> list[str]:
    """Lark for the values without elements."""
    types = place.types() or frozenset()
    if "enum" in place.schema or "const" in place.schema:
        if types - {"number", "boolean", "null"}:
            raise Unwritable(place.pointer, '"enum" with these values cannot be expressed there')
        return [lark.schema(place, merged=True)]
    kinds = place.schema.get("type", ())
    listed = [kinds] if isinstance(kinds, str) else kinds
    found = [number(lark, place, kind) for kind in listed if kind in ("integer", "number")]
    found += ['"true"', '"false"'] if "boolean" in types else []
    return found + (['"null"'] if "null" in types else [])

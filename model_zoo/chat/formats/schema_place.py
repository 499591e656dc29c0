"""A part of a tool's JSON schema: its types and members, for parsers and for grammars.

Parsers interpret the text of a value by these rules, so a grammar may allow only texts that they
interpret as a value of the schema.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from model_zoo.grammars.json_schema import steps_of

MAX_DEPTH = 8  # nesting of references and alternatives
MAX_PARTS = 200  # parts that are read for one value

_TYPE_OF = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}


class Reading(Enum):
    """How the text of a value is read."""

    TEXT = "text"  # the text is the value
    TEXT_OR_NULL = "text or null"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Place:
    """The part `schema` of the schema `root`, at a JSON pointer."""

    root: Any
    schema: Any
    pointer: str = ""

    @classmethod
    def whole(cls, schema: Any) -> "Place":
        return cls(schema, schema)

    def part(self, *steps: str) -> "Place":
        """The part at `steps` from here, which must exist."""
        schema, pointer = self.schema, self.pointer
        for step in steps:
            schema = schema[int(step) if isinstance(schema, list) else step]
            pointer += "/" + step.replace("~", "~0").replace("/", "~1")
        return Place(self.root, schema, pointer)

    def target(self) -> "Place | None":
        """The part that `$ref` refers to; None if there is no such part."""
        reference = self._mapping.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        place = Place.whole(self.root)
        for step in steps_of(reference):
            within = place.schema
            known = isinstance(within, Mapping) and step in within
            if not known and isinstance(within, list):
                known = step.isdecimal() and int(step) < len(within)
            if not known:
                return None
            place = place.part(step)
        return place

    def options(self, keyword: str) -> "list[Place]":
        """The schemas in the list `keyword`."""
        found = self._mapping.get(keyword)
        listed = found if isinstance(found, list) else []
        return [self.part(keyword, str(index)) for index in range(len(listed))]

    def types(self) -> frozenset[str] | None:
        """The types that values may have, with "number" for integers; None if unknown."""
        return _types(self, 0, [MAX_PARTS])

    def reading(self) -> Reading:
        types = self.types()
        if types is None:
            return Reading.TEXT
        if "string" not in types:
            return Reading.JSON
        return Reading.TEXT_OR_NULL if "null" in types else Reading.TEXT

    def member(self, key: str | None) -> "Place":
        """The schema of the member `key` of an object, by this schema and those that it combines;
        an empty one if they have none. `key` None: of a member that none of them declares."""
        return _member(self, key, 0, [MAX_PARTS]) or Place(self.root, {})

    def list_parts(self) -> "tuple[list[Place], Place]":
        """The schemas of the first items of an array, and that of the others."""
        first, rest = list_schemas(self._mapping)
        places = [
            Place(self.root, schema, f"{self.pointer}/prefixItems/{index}")
            for index, schema in enumerate(first)
        ]
        return places, Place(self.root, rest, f"{self.pointer}/items")

    def names(self) -> frozenset[str]:
        """The names of the members that this schema and those that it combines declare."""
        return frozenset(name for place in self._all_parts() for name in place._properties)

    @property
    def _mapping(self) -> Mapping[str, Any]:
        return self.schema if isinstance(self.schema, Mapping) else {}

    @property
    def _properties(self) -> Mapping[str, Any]:
        found = self._mapping.get("properties")
        return found if isinstance(found, Mapping) else {}

    def _own_member(self, key: str | None) -> "Place | None":
        if key is not None and key in self._properties:
            return self.part("properties", key)
        found = []
        patterns = self._mapping.get("patternProperties")
        if isinstance(patterns, Mapping):
            found += [self.part("patternProperties", pattern) for pattern in patterns]
        if isinstance(self._mapping.get("additionalProperties"), Mapping):
            found.append(self.part("additionalProperties"))
        return _joined(self.root, "anyOf", found)

    def _all_parts(self) -> "Iterator[Place]":
        """This part and the parts that it combines or refers to."""
        pending, budget = [(self, 0)], MAX_PARTS
        while pending and budget:
            place, depth = pending.pop(0)
            budget -= 1
            yield place
            if depth < MAX_DEPTH:
                target = place.target()
                found = [] if target is None else [target]
                for keyword in ("allOf", "anyOf", "oneOf"):
                    found += place.options(keyword)
                pending += [(each, depth + 1) for each in found]


def list_schemas(schema: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The schemas of the first items of an array, and that of the others."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    first = schema.get("prefixItems")
    return (first if isinstance(first, list) else []), items


def _member(place: Place, key: str | None, depth: int, budget: list[int]) -> Place | None:
    if depth > MAX_DEPTH or not budget[0]:
        return None
    budget[0] -= 1
    target = place.target()
    parts = [*([] if target is None else [target]), *place.options("allOf")]
    found = [place._own_member(key), *(_member(part, key, depth + 1, budget) for part in parts)]
    for keyword in ("anyOf", "oneOf"):
        options = [_member(part, key, depth + 1, budget) for part in place.options(keyword)]
        found.append(_joined(place.root, "anyOf", [each for each in options if each is not None]))
    return _joined(place.root, "allOf", [each for each in found if each is not None])


def _joined(root: Any, keyword: str, places: list[Place]) -> Place | None:
    """A schema that combines `places`; its pointer is a digest of their pointers."""
    if len(places) < 2:
        return places[0] if places else None
    pointers = json.dumps([keyword, *(place.pointer for place in places)])
    digest = hashlib.sha256(pointers.encode()).hexdigest()
    return Place(root, {keyword: [place.schema for place in places]}, digest)


def type_of(value: Any) -> str | None:
    return _TYPE_OF.get(type(value))


def _types(place: Place, depth: int, budget: list[int]) -> frozenset[str] | None:
    schema = place.schema
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH or not budget[0]:
        return frozenset() if schema is False else None
    budget[0] -= 1
    target = place.target()
    parts = [*place.options("allOf"), *([] if target is None else [target])]
    found = [_declared(schema), *(_types(part, depth + 1, budget) for part in parts)]
    for keyword in ("anyOf", "oneOf"):
        options = [_types(part, depth + 1, budget) for part in place.options(keyword)]
        known = [each for each in options if each is not None]
        found.append(frozenset().union(*known) if known and len(known) == len(options) else None)
    said = [each for each in found if each is not None]
    return frozenset.intersection(*said) if said else None


def _declared(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The types by the schema's own keywords. A schema with properties or items but without a type
    is treated as that of an object or array."""
    kind = schema.get("type")
    kinds = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else None
    types = None
    if kinds is not None:
        names = (each for each in kinds if isinstance(each, str))
        types = frozenset("number" if each == "integer" else each for each in names)
    values = schema.get("enum")
    values = [schema["const"]] if "const" in schema else values
    if isinstance(values, list):
        of_values = frozenset(filter(None, map(type_of, values)))
        return of_values if types is None else types & of_values
    if types is None and "properties" in schema:
        return frozenset(("object",))
    if types is None and ("items" in schema or "prefixItems" in schema):
        return frozenset(("array",))
    return types

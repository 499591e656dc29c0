"""A part of a tool's JSON schema: its types and members, for parsers and for grammars.

Parsers interpret the text of a value by these rules, so a grammar may allow only texts that they
interpret as a value of the schema.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from model_zoo.grammars.schema_parts import allows_nothing, further_keyword, steps_of

MAX_DEPTH = 8  # nesting of references and alternatives
MAX_PARTS = 200  # parts that are read for one value
# Values of an enumeration, or characters of a reference or pattern, that count as a part.
PER_PART = 100

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


@dataclass(slots=True)
class _Budget:
    """The parts that may still be read for one value. Parts are paid before they are listed,
    because several parts may refer to the same long list."""

    left: int = MAX_PARTS

    def spend(self, parts: int, *, items: int = 0) -> bool:
        """Pays for parts and `items`, of which `PER_PART` count as a part; False if too few are
        left."""
        cost = parts + items // PER_PART
        if cost > self.left:
            return False
        self.left -= cost
        return True

    def options(self, place: "Place", keyword: str) -> "list[Place]":
        """The schemas in the list `keyword`; none if they are too many."""
        listed = place._mapping.get(keyword)
        count = len(listed) if isinstance(listed, list) else 0
        return place.options(keyword) if self.spend(count) else []

    def targets(self, place: "Place") -> "list[Place]":
        """The part that `$ref` refers to, if there is one."""
        reference = place._mapping.get("$ref")
        if not isinstance(reference, str) or not self.spend(1, items=len(reference)):
            return []
        target = place.target()
        return [] if target is None else [target]


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
        return _types(self, 0, _Budget())

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
        return self._within(lambda place, budget: place._own_member(key, budget))

    def item(self, index: int) -> "Place":
        """The schema of an item of an array, as `member`."""
        return self._within(lambda place, _: place._own_item(index))

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

    def _within(self, own: "OwnPart") -> "Place":
        return _combined(self, own, 0, _Budget()) or Place(self.root, {})

    def _own_item(self, index: int) -> "Place | None":
        listed = isinstance(self._mapping.get("items"), list)
        keyword, further = ("items", "additionalItems") if listed else ("prefixItems", "items")
        first = self._mapping.get(keyword)
        if isinstance(first, list) and index < len(first):
            return self.part(keyword, str(index))
        return self.part(further) if isinstance(self._mapping.get(further), Mapping) else None

    def _own_member(self, key: str | None, budget: _Budget) -> "Place | None":
        if key is not None and key in self._properties:
            return self.part("properties", key)
        found = []
        patterns = self._mapping.get("patternProperties")
        if isinstance(patterns, Mapping):
            # The names are joined below, so their length counts, too.
            if not (budget.spend(len(patterns)) and budget.spend(0, items=sum(map(len, patterns)))):
                return None
            found += [self.part("patternProperties", pattern) for pattern in patterns]
        keyword = further_keyword(self._mapping)
        if keyword is not None and isinstance(self._mapping[keyword], Mapping):
            found.append(self.part(keyword))
        return _joined(self.root, "anyOf", found)

    def _all_parts(self) -> "Iterator[Place]":
        """This part and the parts that it combines or refers to."""
        pending, budget = deque([(self, 0)]), _Budget()
        while pending:
            place, depth = pending.popleft()
            yield place
            if depth < MAX_DEPTH:
                found = budget.targets(place)
                for keyword in ("allOf", "anyOf", "oneOf"):
                    found += budget.options(place, keyword)
                pending += [(each, depth + 1) for each in found]


def list_schemas(schema: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The schemas of the first items of an array, and that of the others."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    first = schema.get("prefixItems")
    return (first if isinstance(first, list) else []), items


# A function that returns the schema of a part of values by one schema, without those that this one
# combines; None if it has none.
OwnPart = Callable[[Place, _Budget], Place | None]


def _combined(place: Place, own: OwnPart, depth: int, budget: _Budget) -> Place | None:
    if depth > MAX_DEPTH:
        return None
    parts = [*budget.targets(place), *budget.options(place, "allOf")]
    found = [own(place, budget)]
    found += [_combined(part, own, depth + 1, budget) for part in parts]
    for keyword in ("anyOf", "oneOf"):
        parts = budget.options(place, keyword)
        options = [_combined(part, own, depth + 1, budget) for part in parts]
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


def _types(place: Place, depth: int, budget: _Budget) -> frozenset[str] | None:
    schema = place.schema
    if allows_nothing(schema):
        return frozenset()
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return None
    parts = [*budget.options(place, "allOf"), *budget.targets(place)]
    found = [_declared(schema, budget), *(_types(part, depth + 1, budget) for part in parts)]
    for keyword in ("anyOf", "oneOf"):
        options = [_types(part, depth + 1, budget) for part in budget.options(place, keyword)]
        known = [each for each in options if each is not None]
        found.append(frozenset().union(*known) if known and len(known) == len(options) else None)
    said = [each for each in found if each is not None]
    return frozenset.intersection(*said) if said else None


def _declared(schema: Mapping[str, Any], budget: _Budget) -> frozenset[str] | None:
    """The types by the schema's own keywords. A schema with properties or items but without a type
    is treated as that of an object or array. Lists that exceed the budget are ignored."""
    kind = _affordable(schema.get("type"), budget)
    kinds = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else None
    types = None
    if kinds is not None:
        names = (each for each in kinds if isinstance(each, str))
        types = frozenset("number" if each == "integer" else each for each in names)
    values = _affordable(schema.get("enum"), budget)
    values = [schema["const"]] if "const" in schema else values
    if isinstance(values, list):
        of_values = frozenset(filter(None, map(type_of, values)))
        return of_values if types is None else types & of_values
    if types is None and "properties" in schema:
        return frozenset(("object",))
    if types is None and ("items" in schema or "prefixItems" in schema):
        return frozenset(("array",))
    return types


def _affordable(listed: Any, budget: _Budget) -> Any:
    """The value of a keyword, but None for a list that exceeds the budget."""
    return listed if not isinstance(listed, list) or budget.spend(0, items=len(listed)) else None

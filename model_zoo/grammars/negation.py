"""Negates JSON schemas, and tells whether two of them exclude each other."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from model_zoo.grammars.schema_parts import (
    ANNOTATIONS,
    DEFINITIONS,
    TYPES,
    Schema,
    allows_nothing,
    part_at,
    typed,
    types_of,
)

# Limits of the parts, names and values that are read for a schema, and of the nesting of parts,
# references included.
MAX_STEPS = 30_000
_MAX_DEPTH = 8
# Characters of excluded texts that count as a step, and the longest such text: a regular expression
# nests for each of its characters, which llguidance limits.
_STEP_CHARACTERS, _LONGEST_TEXT = 8, 80
_IGNORED = (*ANNOTATIONS, *DEFINITIONS, "$schema", "$id", "discriminator", "readOnly", "writeOnly")
_TYPE_OF: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
# Keywords that describe members by something else than names, or only conditionally.
_DESCRIBING = (
    "patternProperties anyOf oneOf if dependentSchemas dependencies unevaluatedProperties"
).split()
# For each limit: the type, the opposite keyword, and the distance between both limits.
_LIMITS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}


class Exclusions:
    """Negations of parts of the schema `root`, as far as `MAX_STEPS` steps find them."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._steps = MAX_STEPS

    def negated(self, schema: Any, depth: int = 0) -> Schema | bool | None:
        """A schema of exactly the values that do not follow `schema`, in keywords that grammars
        have; None if none is known."""
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or not self._step(depth):
            return None
        values = _values_of(schema)
        schema = {key: value for key, value in schema.items() if key not in _IGNORED}
        if values is not None:  # which are only those of its types
            rest = {key: schema[key] for key in schema if key not in ("type", "const", "enum")}
            schema = {**rest, "enum": values}
        alternatives: list[Schema | bool] = []
        for key in schema:
            found = self._without(schema, key, depth)
            if found is None:
                return None
            alternatives += (each for each in found if each is not False)
        if not alternatives:
            return False
        return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}

    def _without(self, schema: Schema, key: str, depth: int) -> list[Schema | bool] | None:
        """Schemas whose values together are those that do not follow one keyword of a schema."""
        value = schema[key]
        match key, value:
            case "type", str() | list():
                return _of_other_types(types_of(schema))
            case "enum", list():
                return _of_other_values(value) if self._reads_texts(value) else None
            case "required", list() if all(isinstance(name, str) for name in value):
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties", dict():
                inner = {name: self.negated(part, depth + 1) for name, part in value.items()}
                if None in inner.values():
                    return None
                return [
                    {"type": "object", "properties": {name: part}, "required": [name]}
                    for name, part in inner.items()
                    if part is not False
                ]
            case "$ref", str():
                found = [self.negated(part_at(self._root, value), depth + 1)]
            case "not", _:
                return [value] if isinstance(value, bool | dict) else None
            case "allOf", list():
                found = [self.negated(part, depth + 1) for part in value]
            case "anyOf", list():
                every = [self.negated(part, depth + 1) for part in value]
                found = [None if None in every else False if False in every else {"allOf": every}]
            case (limit, int() | float()) if limit in _LIMITS and not isinstance(value, bool):
                kind, opposite, distance = _LIMITS[limit]
                bound = value + distance
                found = [
                    False if kind != "number" and bound < 0 else {"type": kind, opposite: bound}
                ]
            case _:
                return None
        return None if None in found else [each for each in found if each is not None]

    def excludes(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Whether certainly no value follows both parts, judging by their types, their values and
        the members that both require."""
        theirs = [*self._conjuncts(other)]
        return any(
            self._apart(mine, each, depth) for mine in self._conjuncts(one) for each in theirs
        )

    def _apart(self, one: Schema | bool | None, other: Schema | bool | None, depth: int) -> bool:
        if not self._step(depth):
            return False
        if allows_nothing(one) or allows_nothing(other):
            return True
        if not (isinstance(one, dict) and isinstance(other, dict)):
            return False
        kinds, others = _kinds(one), _kinds(other)
        if not kinds & others:
            return True
        values, their_values = _values_of(one), _values_of(other)
        if values is not None and their_values is not None:
            self._steps -= len(values) + len(their_values)
            return not {*map(canonical, values)} & {*map(canonical, their_values)}
        if kinds & others != {"object"}:
            return False
        mine, theirs = (typed(each, "properties", dict) for each in (one, other))
        required = [typed(each, "required", list) for each in (one, other)]
        return any(
            self.excludes(mine[name], theirs[name], depth + 1)
            for name in mine
            if name in theirs and all(name in listed for listed in required)
        )

    def _conjuncts(self, schema: Any, depth: int = 0) -> Iterator[Schema | bool | None]:
        """The schema, and further ones that all its values follow; None in place of those beyond
        the limits."""
        if not isinstance(schema, bool | dict) or not self._step(depth):
            yield None
            return
        yield schema
        if isinstance(schema, dict):
            for part in typed(schema, "allOf", list):
                yield from self._conjuncts(part, depth + 1)
            if isinstance(schema.get("$ref"), str):
                yield from self._conjuncts(part_at(self._root, schema["$ref"]), depth + 1)

    def finite_values(self, schema: Any) -> list[Any] | None:
        """The values that a part lists, some of which it may exclude; None if it has no list."""
        for each in self._conjuncts(schema):
            values = _values_of(each) if isinstance(each, dict) else None
            if values is not None:
                return values if self._step(0, len(values)) else None
        return None

    def names(self, schema: Any) -> dict[str, None] | None:
        """The names of the members that a part describes; None if it describes some by something
        else than names, or only conditionally, or if it exceeds the limits."""
        found: dict[str, None] = {}
        for each in self._conjuncts(schema):
            if each is None:
                return None
            if isinstance(each, bool):
                continue
            further = each.get("additionalProperties", False) is not False
            if further or any(key in each for key in _DESCRIBING):
                return None
            described = typed(each, "properties", dict)
            if not self._step(0, len(described)):
                return None
            found.update(dict.fromkeys(described))
        return found

    def _step(self, depth: int, count: int = 1) -> bool:
        """Counts further parts, names or values. Returns whether they may be read at this depth."""
        self._steps -= count
        return self._steps >= 0 and depth <= _MAX_DEPTH

    def _reads_texts(self, values: list[Any]) -> bool:
        """Whether the values may be excluded, as far as their texts' lengths allow that."""
        lengths = [len(each) for each in values if isinstance(each, str)]
        count = len(values) + sum(lengths) // _STEP_CHARACTERS
        return self._step(0, count) and max(lengths, default=0) <= _LONGEST_TEXT


def _of_other_types(types: list[str]) -> list[Schema | bool] | None:
    if "integer" in types and "number" not in types:
        return None  # no keyword excludes integers
    others = [each for each in TYPES if each not in types]
    return [{"type": others} if others else False]


def _of_other_values(values: list[Any]) -> list[Schema | bool] | None:
    """Schemas of all values but these; None if one of them is a list or an object."""
    by_type: dict[str, list[Any]] = {}
    for each in values:
        by_type.setdefault(_TYPE_OF[type(each)], []).append(each)
    if "array" in by_type or "object" in by_type:
        return None
    found = _of_other_types([*by_type]) or []
    if "string" in by_type:
        found.append({"type": "string", "pattern": f"^({_other_texts(by_type['string'])})$"})
    if "boolean" in by_type:
        others = [each for each in (False, True) if each not in by_type["boolean"]]
        found.append({"enum": others} if others else False)
    if "number" in by_type:
        ordered = sorted({*by_type["number"]})
        bounds = [None, *ordered, None]
        for low, high in pairwise(bounds):
            least = {} if low is None else {"exclusiveMinimum": low}
            most = {} if high is None else {"exclusiveMaximum": high}
            found.append({"type": "number", **least, **most})
    return found


def _other_texts(texts: list[str]) -> str:
    """A regular expression for all strings except `texts`: those that leave their prefix tree."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _leaving(tree)


def _leaving(node: dict[str, Any]) -> str:
    following = [each for each in node if each]
    outside = "".join(map(_literal, following))
    other = f"[^{outside}][\\s\\S]*" if outside else "[\\s\\S]+"
    inner = [f"{_literal(each)}({_leaving(node[each])})" for each in following]
    return "|".join([*inner, other, *([] if "" in node else [""])])


def _literal(character: str) -> str:
    """A character, escaped for a regular expression or one of its classes."""
    return f"\\{character}" if character in r"\.+*?()|[]{}^$#&-~" else character


def _values_of(schema: Schema) -> list[Any] | None:
    """The values that a schema lists itself, by `const` or `enum`."""
    kinds = _kinds(schema)
    listed = schema.get("enum")
    if "const" in schema:
        allowed = isinstance(listed, list) and canonical(schema["const"]) in map(canonical, listed)
        listed = [schema["const"]] if allowed or not isinstance(listed, list) else []
    if isinstance(listed, list):
        return [each for each in listed if _TYPE_OF[type(each)] in kinds]
    if "type" in schema and kinds <= {"boolean", "null"}:
        return [
            *([False, True] if "boolean" in kinds else ()),
            *([None] if "null" in kinds else ()),
        ]
    return None


def _kinds(schema: Schema) -> set[str]:
    """The types of a schema's values, with integers as numbers."""
    return {"number" if each == "integer" else each for each in types_of(schema)}


def canonical(value: Any) -> str:
    """A key that is the same for values that are equal in JSON, such as 1 and 1.0."""
    return json.dumps(json.loads(json.dumps(value), parse_int=float), sort_keys=True)

"""Rewrites schemas that combine others (`allOf`, `anyOf`, `$ref` …) as plain alternatives."""

import json
import math
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from model_zoo.chat.formats.lark import Unwritable
from model_zoo.chat.formats.schema_place import Place, list_schemas
from model_zoo.chat.formats.text_patterns import refuse

# Keywords that a grammar of single names and values cannot enforce; schemas with them are refused.
UNSERVED = tuple(
    "not if dependentRequired dependentSchemas dependencies unevaluatedProperties "
    "propertyNames contains uniqueItems unevaluatedItems $dynamicRef $recursiveRef".split()
)
MAX_LEVELS = 64  # nesting of references and alternatives
MAX_ALTERNATIVES = 200  # alternatives of one value, nested ones included
VALUES_PER_PART = 1000  # compared values that count as an alternative

_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
_LEAST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_MOST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_ONE = ("pattern", "format")
_OF_LISTS = ("items", "prefixItems", "additionalItems")
_OF_OBJECTS = ("properties", "additionalProperties", "patternProperties")
_OTHERS = ("type", "enum", "const", "multipleOf", "required")
CONSTRAINTS = frozenset((*_LEAST, *_MOST, *_ONE, *_OF_LISTS, *_OF_OBJECTS, *_OTHERS))

Schema = Mapping[str, Any]


def plain(place: Place) -> list[Place]:
    """Schemas without combining keywords; a value must follow one of them. Empty if no value is
    allowed. Raises Unwritable."""
    return _plain(place, 0, [MAX_ALTERNATIVES])


def _plain(place: Place, levels: int, budget: list[int]) -> list[Place]:
    schema = place.schema
    if not isinstance(schema, Mapping) or not schema:
        return [] if schema is False else [Place(place.root, {}, "any")]
    refuse(place, UNSERVED)
    if not any(each in schema for each in _COMBINING):
        return [place]
    factors = _factors(place, levels, budget)
    if len(factors) == 1:
        return factors[0]
    found: list[Schema] = [{}]
    for factor in factors:
        others = [other.schema for other in factor]
        compared = len(others) * _enumerated(found) + len(found) * _enumerated(others)
        _spend(place, budget, compared // VALUES_PER_PART)
        both = (_intersection(place, one, other) for one, other in product(found, others))
        found = [each for each in both if each is not None]
        _spend(place, budget, len(found))
    # "~2" does not occur in JSON pointers, so these names are unambiguous.
    return [Place(place.root, each, f"{place.pointer}/~2{at}") for at, each in enumerate(found)]


def _factors(place: Place, levels: int, budget: list[int]) -> list[list[Place]]:
    """Lists of schemas; a value must follow at least one schema of each list."""
    schema = place.schema
    _spend(place, budget, 1)
    if levels == MAX_LEVELS:
        raise Unwritable(place.pointer, "too many schemas refer to each other")
    own = {key: value for key, value in schema.items() if key in CONSTRAINTS}
    factors = [[Place(place.root, own)]] if own else []
    if "$ref" in schema:
        target = place.target()
        if target is None:
            raise Unwritable(place.pointer, '"$ref" does not refer to a part of the schema')
        factors.append(_plain(target, levels + 1, budget))
    factors += [_plain(part, levels + 1, budget) for part in place.options("allOf")]
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            factors.append(_alternatives(place, keyword, levels, budget))
    return factors


def _alternatives(place: Place, keyword: str, levels: int, budget: list[int]) -> list[Place]:
    found: list[Place] = []
    for part in place.options(keyword):
        found += _plain(part, levels + 1, budget)
        if len(found) > MAX_ALTERNATIVES:
            raise Unwritable(place.pointer, f'"{keyword}" has too many alternatives')
    return found


def _spend(place: Place, budget: list[int], count: int) -> None:
    budget[0] -= count
    if budget[0] < 0:
        raise Unwritable(place.pointer, "too many schemas refer to each other")


def _intersection(place: Place, one: Schema, other: Schema) -> dict[str, Any] | None:
    """A schema whose values follow both; None if there are none. `place`: the combining schema."""
    both: dict[str, Any] = {**other, **one}
    both.update({k: max(one[k], other[k]) for k in _LEAST if k in one and k in other})
    both.update({k: min(one[k], other[k]) for k in _MOST if k in one and k in other})
    for keyword in (*_ONE, "multipleOf"):
        if keyword in one and keyword in other and one[keyword] != other[keyword]:
            both[keyword] = _common(place, keyword, one[keyword], other[keyword])
    if "required" in one and "required" in other:
        both["required"] = [*dict.fromkeys((*one["required"], *other["required"]))]
    kinds, values = _kinds(one, other), _values(one, other)
    if kinds is not None:
        both["type"] = kinds
    if values is not None:
        both.pop("const", None)
        both["enum"] = values
    if [] in (kinds, values):
        return None
    if any(key in each for each in (one, other) for key in _OF_LISTS):
        _add_items(both, one, other)
    if any(key in each for each in (one, other) for key in _OF_OBJECTS):
        _add_members(place, both, one, other)
    return both


def _common(place: Place, keyword: str, one: Any, other: Any) -> Any:
    if keyword == "multipleOf" and isinstance(one, int) and isinstance(other, int):
        return math.lcm(one, other)
    raise Unwritable(place.pointer, f'several "{keyword}" cannot be expressed')


def _kinds(one: Schema, other: Schema) -> list[str] | None:
    """The types that both allow; None if neither states types."""
    listed = [_type_names(each["type"]) for each in (one, other) if "type" in each]
    if len(listed) < 2:
        return listed[0] if listed else None
    first, second = ({*each, *_integers(each)} for each in listed)
    common = first & second
    return sorted(common - _integers(common))


def _integers(kinds: Iterable[str]) -> set[str]:
    """The types that "number" includes."""
    return {"integer"} if "number" in kinds else set()


def _type_names(kind: Any) -> list[str]:
    return [kind] if isinstance(kind, str) else list(kind)


def _values(one: Schema, other: Schema) -> list[Any] | None:
    """The values that both enumerate; None if neither enumerates values."""
    listed = [[each["const"]] for each in (one, other) if "const" in each]
    listed += [each["enum"] for each in (one, other) if "enum" in each]
    if not listed:
        return None
    others = [set(map(_canonical, each)) for each in listed[1:]]
    return [v for v in listed[0] if all(_canonical(v) in each for each in others)]


def _enumerated(schemas: Iterable[Schema]) -> int:
    return sum(len(each.get("enum", ())) for each in schemas)


def _canonical(value: Any) -> str:
    """The same text for equal values, as 1 and 1.0 are."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _add_items(both: dict[str, Any], one: Schema, other: Schema) -> None:
    (first, rest), (second, further) = list_schemas(one), list_schemas(other)
    count = max(len(first), len(second))
    padded = ([*first, *[rest] * count], [*second, *[further] * count])
    both["prefixItems"] = [_all(padded[0][at], padded[1][at]) for at in range(count)]
    both["items"] = _all(rest, further)
    both.pop("additionalItems", None)


def _add_members(place: Place, both: dict[str, Any], one: Schema, other: Schema) -> None:
    for each, beside in ((one, other), (other, one)):
        if "patternProperties" in each and any(key in beside for key in _OF_OBJECTS):
            reason = '"patternProperties" beside members of other schemas cannot be expressed'
            raise Unwritable(place.pointer, reason)
    names = {**one.get("properties", {}), **other.get("properties", {})}
    if names:
        members = {name: _all(_of_name(one, name), _of_name(other, name)) for name in names}
        both["properties"] = members
    further = _all(one.get("additionalProperties", True), other.get("additionalProperties", True))
    if further is not True:
        both["additionalProperties"] = further


def _of_name(schema: Schema, name: str) -> Any:
    return schema.get("properties", {}).get(name, schema.get("additionalProperties", True))


def _all(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if one in (True, {}):
        return other
    return one if other in (True, {}) or one == other else {"allOf": [one, other]}

"""Rewrites JSON schemas: expresses keywords that grammars lack by keywords that they have."""

import json
import math
from itertools import permutations
from typing import Any

from model_zoo.grammars.conditions import exclusive, unconditional
from model_zoo.grammars.local_references import localised
from model_zoo.grammars.name_patterns import apart
from model_zoo.grammars.negation import Exclusions, canonical
from model_zoo.grammars.schema_parts import (
    ANNOTATIONS,
    Schema,
    allows_nothing,
    further_keyword,
    mapped,
    part_at,
    typed,
    types_of,
)
from model_zoo.grammars.text_formats import FORMATS

# Characters of JSON that rewriting may add to a schema.
MAX_REPEATED_CHARACTERS = 256 * 1024
# How many arrays `uniqueItems` may list.
MAX_LISTED_ARRAYS = 400
# At how many positions the item of `contains` may be.
_CONTAINED_AMONG = 8
# llguidance has bounds of 64 bits.
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
_GREATEST, _LARGEST_DOUBLE = 2**62, 1e308
# Zod writes this look-ahead, which grammars lack, before the pattern of an address: it must not
# begin with a dot or have two in a row. The format `email` excludes both.
_EMAIL_LOOK_AHEAD = r"^(?!\.)(?!.*\.\.)"
# Formats for which llguidance accepts dates and leap seconds that most JSON readers refuse.
_TIMES = ("date", "time", "date-time")
# Pydantic's pattern of decimal numbers, whose look-ahead demands a digit, and one without.
_DECIMAL = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$"}


def simplified(schema: Any) -> Any:
    """The schema, rewritten for grammars. References lead to definitions (`localised`).

    Equivalent: `not`, `if`, `dependent…` and `oneOf` where `negation` knows what they exclude;
    `propertyNames` that are a list, a pattern or a format; `patternProperties` with the same schema
    or one for every name beside others; `unevaluatedProperties` beside `allOf`
    and references; `uniqueItems` with few possible items. Narrower: `contains`, bounds beyond 62
    bits, `minProperties: 1` where an object does not mention others than its properties, and
    alternatives with a discriminator, which becomes required. Wider: other `uniqueItems`, which are
    left out, and other `oneOf`, which become `anyOf`. Keywords stay where rewriting would make the
    schema too long.
    """
    found = localised(schema)
    return mapped(found, _Rewriting(found).change) if isinstance(found, dict) else found


class _Rewriting:
    """Rewrites the parts of the schema `root` within a budget of added characters."""

    def __init__(self, root: Schema) -> None:
        self._root, self._known = root, Exclusions(root)
        self._budget = MAX_REPEATED_CHARACTERS

    def change(self, schema: Schema) -> Schema | bool:
        if allows_nothing(schema):
            return False
        schema = self._evaluated(schema)
        if "propertyNames" in schema:
            schema = self._with_named_members(schema)
        schema = apart(_with_bounds(_with_pattern(schema)), self._spend)
        if schema.get("uniqueItems") is not None:
            schema = self._with_different_items(schema)
        if "contains" in schema:
            schema = self._containing(schema)
        schema = self._with_first_member(schema)
        schema = unconditional(self._known, schema, self._spend)
        return exclusive(self._root, self._known, schema, self._spend)

    def _spend(self, added: Any, times: int = 1) -> bool:
        """Takes `times` the length of a value from the budget; False if that is used up."""
        if self._budget >= 0:
            self._budget -= times * len(json.dumps(added))
        return self._budget >= 0

    def _evaluated(self, schema: Schema) -> Schema:
        """A schema with `additionalProperties` instead of `unevaluatedProperties`."""
        others = schema.get("unevaluatedProperties")
        if others is None:
            return schema
        rest = {key: value for key, value in schema.items() if key != "unevaluatedProperties"}
        if further_keyword(schema) is not None:
            rest.setdefault("additionalProperties", others)
            return rest
        names = self._known.names(rest)
        if names is None:
            return schema
        own = typed(schema, "properties", dict)
        added: Schema = {name: {} for name in names if name not in own}
        if added and not self._spend(added):
            return schema
        return {**rest, "properties": {**own, **added}, "additionalProperties": others}

    def _with_named_members(self, schema: Schema) -> Schema:
        """The schema without `propertyNames`, if these are any strings, a list, a pattern or a
        format; otherwise as it is."""
        names: Any = schema["propertyNames"]
        rest = {key: value for key, value in schema.items() if key != "propertyNames"}
        if isinstance(names, dict) and names.keys() == {"$ref"} and isinstance(names["$ref"], str):
            names = part_at(self._root, names["$ref"])
        if names is True:
            return rest
        if not isinstance(names, dict) or names.get("type", "string") != "string":
            return schema
        demands = {key: names[key] for key in names.keys() - {"type", *ANNOTATIONS}}
        if not demands or (demands.keys() == {"format"} and demands["format"] not in FORMATS):
            return rest
        declared = typed(schema, "properties", dict)
        others = rest.get("additionalProperties", {})
        listed = _listed_names(demands)
        if "patternProperties" in schema or (declared and listed is None):
            return schema
        if listed is not None:
            # Nested lists multiply, so repeated schemas are limited.
            if not (self._spend(listed) and self._spend(others, len(listed))):
                return schema
            members = {name: declared.get(name, others) for name in listed}
            return {**rest, "properties": members, "additionalProperties": False}
        pattern = _pattern_of_names(demands)
        if pattern is None:
            return schema
        return {**rest, "patternProperties": {pattern: others}, "additionalProperties": False}

    def _with_different_items(self, schema: Schema) -> Schema:
        """The schema without `uniqueItems`: with a list of all arrays if these are few; otherwise
        with at most as many items as there are values, if these are known."""
        rest = {key: value for key, value in schema.items() if key != "uniqueItems"}
        found = self._known.finite_values(schema.get("items"))
        least = _count(schema, "minItems", 0)
        if schema["uniqueItems"] is not True or found is None or least is None:
            return rest
        values = [*{canonical(each): each for each in found}.values()]
        most = _count(schema, "maxItems", len(values))
        if most is None or "prefixItems" in schema:
            return rest
        rest["maxItems"] = most = min(most, len(values))
        arrays: list[list[Any]] = []
        for length in range(least, most + 1):
            if len(arrays) + math.perm(len(values), length) > MAX_LISTED_ARRAYS:
                return rest
            arrays += map(list, permutations(values, length))
        return _with_arrays(rest, {"enum": arrays}) if self._spend(values, len(arrays)) else rest

    def _containing(self, schema: Schema) -> Schema:
        """The schema without `contains`: one of the first items is that item."""
        left_out = ("contains", "minContains", "maxContains")
        rest = {key: value for key, value in schema.items() if key not in left_out}
        least = _count(schema, "minContains", 1)
        if least == 0 and "maxContains" not in schema:
            return rest
        items, item = schema.get("items", True), schema["contains"]
        places = _count(schema, "maxItems", _CONTAINED_AMONG)
        different = "maxContains" in schema or "prefixItems" in schema or isinstance(items, list)
        if least != 1 or places is None or different:
            return schema
        item = item if items in ({}, True) else {"allOf": [items, item]}
        places = min(places, _CONTAINED_AMONG)
        if not self._spend([items, item], places * places):
            return schema
        arrays = [
            {"prefixItems": [*[items] * at, item], "items": items, "minItems": at + 1}
            for at in range(places)
        ]
        return _with_arrays(rest, {"anyOf": [{"type": "array", **each} for each in arrays]})

    def _with_first_member(self, schema: Schema) -> Schema:
        """The schema without `minProperties: 1`, which grammars lack beside optional properties:
        one of these is the first member, or, where a schema describes others, there is only one of
        those or more."""
        members = typed(schema, "properties", dict)
        names = [name for name in members if members[name] is not False]
        required = [name for name in typed(schema, "required", list) if isinstance(name, str)]
        if schema.get("minProperties") != 1 or not names or {*names} <= {*required}:
            return schema
        rest = {key: value for key, value in schema.items() if key != "minProperties"}
        if required:
            return rest
        if not self._spend(names, len(names)):
            return schema
        alternatives: list[Schema] = [
            {"properties": dict.fromkeys(names[:at], False), "required": [name]}
            for at, name in enumerate(names)
        ]
        if rest.get("additionalProperties", False) is not False or "patternProperties" in rest:
            alternatives.append({"properties": dict.fromkeys(names, False), "minProperties": 1})
        return _combined(rest, {"anyOf": alternatives})


def _combined(schema: Schema, other: Schema) -> Schema:
    return {**schema, "allOf": [*typed(schema, "allOf", list), other]}


def _with_arrays(schema: Schema, arrays: Schema) -> Schema:
    """The schema, whose arrays also follow `arrays`. Without `type`, it allows arrays only."""
    kinds = types_of(schema) if "type" in schema else ["array"]
    if "array" not in kinds:
        return schema
    others = [each for each in kinds if each != "array"]
    return _combined(schema, {"anyOf": [{"type": others}, arrays]} if others else arrays)


def _count(schema: Schema, key: str, default: int) -> int | None:
    """The value of a keyword; None if it is not a whole number of at least 0."""
    value = schema.get(key, default)
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    return int(value) if whole and value % 1 == 0 else None


def _listed_names(demands: Schema) -> list[str] | None:
    match demands:
        case {"const": str(name)}:
            listed = [name]
        case {"enum": [*listed]} if all(isinstance(name, str) for name in listed):
            pass
        case _:
            return None
    return listed if len(demands) == 1 else None


def _pattern_of_names(demands: Schema) -> str | None:
    match demands:
        case {"pattern": str(pattern)} if len(demands) == 1:
            return pattern
        case {"format": str(name)} if len(demands) == 1:
            return f"^({FORMATS[name]})$"
    if demands.keys() <= {"minLength", "maxLength"}:
        return f"^[\\s\\S]{{{demands.get('minLength', 0)},{demands.get('maxLength', '')}}}$"
    return None


def _with_pattern(schema: Schema) -> Schema:
    """The schema without the look-ahead that libraries write in patterns, and with patterns for
    dates and times."""
    pattern, form = schema.get("pattern"), schema.get("format")
    if pattern is None and form in _TIMES:
        others = {key: value for key, value in schema.items() if key != "format"}
        return {**others, "pattern": f"^({FORMATS[form]})$"}
    if not isinstance(pattern, str):
        return schema
    if form == "email":
        begin, _, rest = pattern.partition(_EMAIL_LOOK_AHEAD)
        return {**schema, "pattern": f"^{rest}"} if not begin and rest else schema
    return {**schema, "pattern": _DECIMAL[pattern]} if pattern in _DECIMAL else schema


def _with_bounds(schema: Schema) -> Schema:
    """The schema with bounds of at most 62 bits; those at the limits of doubles are left out."""
    changed = dict(schema)
    for key, sign in _BOUNDS.items():
        bound = schema.get(key)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            continue
        if bound * sign < -_LARGEST_DOUBLE:
            del changed[key]
        elif bound * sign < -_GREATEST:
            changed[key] = -sign * _GREATEST
    return changed

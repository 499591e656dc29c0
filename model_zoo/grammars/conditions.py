"""Rewrites conditions of JSON schemas (`not`, `if`, `dependent…`, `oneOf`) as alternatives."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

from model_zoo.grammars.negation import Exclusions
from model_zoo.grammars.schema_parts import Schema, part_at, typed

# Takes the length of a schema from a budget; False if that is used up.
Spend = Callable[[Any], bool]
_CONDITIONS = ("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies")
# How many alternatives of `oneOf` are compared, and how many overlapping ones are made exclusive.
_MAX_COMPARED, _MAX_OVERLAPPING = 64, 16


def unconditional(known: Exclusions, schema: Schema, spend: Spend) -> Schema:
    """An equivalent schema whose conditions are parts of `allOf`. Conditions whose negation is not
    known or exceeds the budget stay."""
    if not any(key in schema for key in _CONDITIONS):
        return schema
    rest = dict(schema)
    found: list[Any] = []
    if "not" in schema:
        other = known.negated(schema["not"])
        if other is not None and spend(other):
            del rest["not"]
            found.append(other)
    chosen = _chosen(known, schema)
    if chosen is not None and spend(chosen):
        for key in ("if", "then", "else"):
            rest.pop(key, None)
        found.append(chosen)
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        dependent = _dependent(rest.get(key))
        if dependent is not None and spend(dependent):
            del rest[key]
            found += dependent
    found = [each for each in found if each is not True]
    return {**rest, "allOf": [*typed(rest, "allOf", list), *found]} if found else rest


def _chosen(known: Exclusions, schema: Schema) -> Schema | bool | None:
    """`if`, `then` and `else` as alternatives; None if the negation of `if` is not known."""
    if "if" not in schema or not ("then" in schema or "else" in schema):
        return True
    other = known.negated(schema["if"])
    if other is None:
        return None
    cases = [(schema["if"], schema.get("then", True)), (other, schema.get("else", True))]
    alternatives = [
        condition if demanded in (True, {}) else {"allOf": [condition, demanded]}
        for condition, demanded in cases
        if condition is not False and demanded is not False
    ]
    return {"anyOf": alternatives} if alternatives else False


def _dependent(value: Any) -> list[Schema] | None:
    """`dependent…` as alternatives: a member is absent, or what depends on it holds."""
    if not isinstance(value, dict):
        return None
    found = []
    for name, demanded in value.items():
        present: Schema = {"type": "object", "required": [name]}
        if isinstance(demanded, list):
            present["required"] = [*dict.fromkeys((name, *demanded))]
        else:
            present["allOf"] = [demanded]
        found.append({"anyOf": [{"properties": {name: False}}, present]})
    return found


def exclusive(root: Schema, known: Exclusions, schema: Schema, spend: Spend) -> Schema:
    """A schema with `anyOf` instead of `oneOf`. Its alternatives exclude each other if the
    negations of those that overlap are known and within the budget. They require the property that
    a `discriminator` names."""
    schema = _discriminated(root, schema, spend)
    alternatives = schema.get("oneOf")
    if not isinstance(alternatives, list):
        return schema
    rest = {key: value for key, value in schema.items() if key != "oneOf"}
    either: Schema = {"anyOf": _apart(known, alternatives, spend) or alternatives}
    if "anyOf" in rest:
        return {**rest, "allOf": [*typed(rest, "allOf", list), either]}
    return {**rest, **either}


def _apart(known: Exclusions, alternatives: list[Any], spend: Spend) -> list[Any] | None:
    """The alternatives, each without the values of those that it overlaps; None if a negation is
    not known."""
    if len(alternatives) > _MAX_COMPARED:
        return None
    overlapping: dict[int, list[int]] = {}
    for one, other in combinations(range(len(alternatives)), 2):
        if not known.excludes(alternatives[one], alternatives[other]):
            overlapping.setdefault(one, []).append(other)
            overlapping.setdefault(other, []).append(one)
        if len(overlapping) > _MAX_OVERLAPPING:
            return None
    others = {at: known.negated(alternatives[at]) for at in overlapping}
    excluded = {at: [others[each] for each in listed] for at, listed in overlapping.items()}
    if None in others.values() or not spend([*excluded.values()]):
        return None
    return [
        {"allOf": [each, *excluded[at]]} if at in excluded else each
        for at, each in enumerate(alternatives)
    ]


def _discriminated(root: Schema, schema: Schema, spend: Spend) -> Schema:
    name = typed(schema, "discriminator", dict).get("propertyName")
    if not isinstance(name, str):
        return schema
    changed = dict(schema)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            changed[key] = [_requiring(root, each, name, spend) for each in schema[key]]
    return changed


def _requiring(root: Schema, alternative: Any, name: str, spend: Spend) -> Any:
    """The alternative, which requires the member `name` if it declares it."""
    target = alternative
    if isinstance(target, dict) and target.keys() == {"$ref"} and isinstance(target["$ref"], str):
        target = part_at(root, target["$ref"])
    required = typed(target, "required", list)
    if name not in typed(target, "properties", dict) or name in required or not spend(target):
        return alternative
    return {**target, "required": [name, *required]}

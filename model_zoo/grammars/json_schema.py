"""JSON schemas of requests: their parts, references among them, and annotations."""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

from runtime.errors import RequestError

Schema = dict[str, Any]

# Limit of the nesting of parts and of the parts that they refer to. llguidance recurses, and from
# some 3,000 levels on it overflows the stack of a thread.
MAX_LEVELS = 1000
# Limit of the parts of a schema in which parts that describe the same value are merged. llguidance
# merges them before it applies limits of its own.
MAX_MERGED_PARTS = 200_000
MAX_COMPARED = 200_000  # schemas and names that are read to find this number
# JSON of the schemas that `simplified` repeats for each of several names of members.
MAX_REPEATED_CHARACTERS = 256 * 1024

# Keywords whose value is a schema, a list of schemas, or schemas by name.
_SINGLE = (
    "items additionalItems additionalProperties unevaluatedItems unevaluatedProperties "
    "contains propertyNames not if then else"
).split()
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Keywords by which other schemas evaluate members of the same object.
_EVALUATING = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
# Formats that llguidance enforces. By the specification, others may be treated as annotations.
_FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
_ANNOTATIONS = ("title", "description", "default", "examples", "deprecated", "$comment")
# Addresses of the format begin with no dot and have no two in a row, which Zod's pattern repeats.
_EMAIL_LOOK_AHEAD = r"^(?!\.)(?!.*\.\.)"
_TYPES = ["null", "boolean", "number", "string", "array", "object"]
# As in llama.cpp, white space is limited: small models may never stop writing it.
_OPTIONS = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}", "lenient": False}
# With fixed separators instead of white space, JSON may be an alternative to rules that begin
# alike.
_MERGED = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
}


def parts(schema: Schema) -> Iterator[tuple[str, Any]]:
    """The schemas directly within `schema`, with their JSON pointers."""
    for key, value in schema.items():
        if key in _SINGLE and isinstance(value, dict):
            yield f"/{key}", value
        elif key in _LISTS and isinstance(value, list):
            yield from ((f"/{key}/{index}", each) for index, each in enumerate(value))
        elif key in _MAPS and isinstance(value, dict):
            yield from ((f"/{key}/{_escaped(name)}", each) for name, each in value.items())


def check_references(field: str, schema: Any) -> None:
    """Raises RequestError for a reference to another document, for parts that refer to each other
    too deeply, and for parts that become too many where they are merged."""
    targets: set[str] = set()
    _check_targets(field, schema, "", targets)
    depths: dict[int, int] = {}
    levels = _depth(schema, depths)
    for target in targets:
        part = _part_at(schema, target)
        levels += depths.get(id(part), MAX_LEVELS) if isinstance(part, dict | list) else 1
    if levels > MAX_LEVELS:
        raise RequestError(
            f'field "{field}" has parts that refer to each other {levels:,} levels deep; at most '
            f"{MAX_LEVELS:,} are accepted"
        )
    merged = _merged_parts(schema, schema, {}, [MAX_COMPARED])
    if merged > MAX_MERGED_PARTS:
        raise RequestError(
            f'field "{field}" has parts that describe the same values; when they are merged, it '
            f"has more than {MAX_MERGED_PARTS:,} parts. Simplify it."
        )


def steps_of(reference: str) -> list[str]:
    """The steps of a JSON pointer in a reference (RFC 6901)."""
    steps = unquote(reference[1:]).split("/")[1:]
    return [step.replace("~1", "/").replace("~0", "~") for step in steps]


def _part_at(schema: Any, reference: str) -> Any:
    """The part of a schema that a reference within it leads to; None if there is none."""
    part = schema
    for step in steps_of(reference):
        try:
            part = part[int(step)] if isinstance(part, list) else part[step]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return part


def _depth(schema: Any, depths: dict[int, int]) -> int:
    """The number of levels of a schema; `depths`: the numbers of its parts by their `id`."""
    if not isinstance(schema, dict):
        return 1
    within = [_depth(part, depths) for _, part in parts(schema)]
    depths[id(schema)] = 1 + max(within, default=0)
    return depths[id(schema)]


def _merged_parts(schema: Any, root: Any, counts: dict[int, int], budget: list[int]) -> int:
    """About as many parts as a schema has after merging: where several schemas describe a value,
    those of further members and items are copied for each name, position and alternative.
    `counts`: those of its parts by their `id`. `budget`: the schemas and names that may still be
    compared; too many count as too many parts."""
    if not isinstance(schema, dict):
        return 1
    if budget[0] < 0:
        return MAX_MERGED_PARTS + 1
    if id(schema) not in counts:
        counts[id(schema)] = 1  # for references to a part from within it
        count = 1 + sum(_merged_parts(part, root, counts, budget) for _, part in parts(schema))
        together = _described_together(schema, root)
        if len(together) > 1 or "patternProperties" in schema:
            named = [set(_typed(each, "properties", dict)) for each in together]
            budget[0] -= len(together) + sum(map(len, named))
            listed = [len(_typed(each, key, list)) for each in together for key in _LISTS]
            copied = [part for each in together for part in _further(each, root)]
            copies = sum(_merged_parts(each, root, counts, budget) for each in copied)
            count += (len(set[str]().union(*named)) + sum(listed)) * copies
        counts[id(schema)] = count
    return counts[id(schema)]


def _described_together(schema: Schema, root: Any) -> list[Schema]:
    """The schema and those that it combines, which describe the same value. Alternatives alone, or
    a reference alone, combine nothing."""
    constraints = schema.keys() - {*_ANNOTATIONS, "$defs", "definitions", "$schema", "$id"}
    if len(constraints) == 1 and "allOf" not in constraints:
        return [schema]
    found: dict[int, Schema] = {}
    pending: list[Any] = [schema]
    while pending:
        each = pending.pop()
        if isinstance(each, dict) and id(each) not in found:
            found[id(each)] = each
            for key in ("allOf", "anyOf", "oneOf"):
                pending += _typed(each, key, list)
            if "$ref" in each:
                pending.append(_part_at(root, each["$ref"]))
    return [*found.values()]


def _further(schema: Schema, root: Any) -> Iterator[Any]:
    """The schemas for members and items that none of its other keywords describes, and the parts
    they refer to."""
    found = [*_typed(schema, "patternProperties", dict).values()]
    found += [schema[key] for key in (further_keyword(schema), "items") if key in schema]
    for each in found:
        if isinstance(each, dict):
            yield each
            if "$ref" in each:
                yield _part_at(root, each["$ref"])


def _typed(schema: Schema, keyword: str, kind: type) -> Any:
    """The value of a keyword; an empty one if it has another type."""
    found = schema.get(keyword)
    return found if isinstance(found, kind) else kind()


def _check_targets(field: str, schema: Any, pointer: str, targets: set[str]) -> None:
    if not isinstance(schema, dict):
        return
    for key in _REFERENCES:
        target = schema.get(key)
        if target is not None and not (isinstance(target, str) and target.startswith("#")):
            raise RequestError(
                f'field "{field}": "{key}" at "{pointer}" is {str(target)[:80]!r}; only references '
                'within the schema, which begin with "#", are accepted'
            )
        if target is not None:
            targets.add(target)
    for place, part in parts(schema):
        _check_targets(field, part, pointer + place, targets)


def refers(schema: Any) -> bool:
    """Whether a part of the schema refers to another one."""
    if not isinstance(schema, dict):
        return False
    return any(key in schema for key in _REFERENCES) or any(
        refers(part) for _, part in parts(schema)
    )


def compilable(schema: Any, *, merged: bool = False) -> Any:
    """The schema for llguidance: with our options, and without annotations that it refuses.
    `merged`: other rules may begin at the same place and in the same way.

    As in llama.cpp, an object with properties may have no others unless the schema allows them;
    otherwise models may add them without end.
    """
    changed = _mapped(_mapped(simplified(schema), _without_annotations), _with_integers)
    if not _combines(changed):
        changed = _mapped(changed, closed)
    if not isinstance(changed, dict):
        return changed
    return {**changed, "x-guidance": _MERGED if merged else _OPTIONS}


def simplified(schema: Any) -> Any:
    """An equal schema without some keywords that grammars do not have and libraries write often:
    names of members that a pattern or a list allows (`propertyNames`), `unevaluatedProperties`
    where nothing else evaluates any, `not` of all values, and the look-ahead of patterns that
    repeat `format: email`. `propertyNames` stay where the schema would become much longer."""
    return _mapped(schema, partial(_simplified, [MAX_REPEATED_CHARACTERS]))


def allows_nothing(schema: Any) -> bool:
    """Whether a schema excludes all values: `false`, or `not` of all values."""
    return schema is False or (isinstance(schema, Mapping) and schema.get("not") in ({}, True))


def further_keyword(schema: Mapping[str, Any]) -> str | None:
    """The keyword with the schema of the members that no other keyword of an object's schema names:
    `additionalProperties`, or `unevaluatedProperties` where nothing else evaluates any. None if the
    schema has neither."""
    keywords = ["additionalProperties"]
    if not any(key in schema for key in _EVALUATING):
        keywords.append("unevaluatedProperties")
    return next((key for key in keywords if key in schema), None)


def rebased(schema: Any, pointer: str) -> Any:
    """The schema with references adapted for its use within another schema, at `pointer`."""

    def change(part: Schema) -> Schema:
        moved = {
            key: f"#{pointer}{target[1:]}"
            for key in _REFERENCES
            if isinstance(target := part.get(key), str) and (target == "#" or target[:2] == "#/")
        }
        return {**part, **moved}

    return _mapped(schema, change)


def place_of_error(
    schema: Any, error_of: Callable[[Any], str | None], *, limit_s: float = 1.0
) -> str:
    """The JSON pointer of the innermost part with the same error as the whole schema, as far as it
    is found within `limit_s`.

    `error_of`: the error of a schema, None if there is none.
    """
    if not isinstance(schema, dict):
        return ""
    until = time.monotonic() + limit_s
    error, pointer = error_of(schema), ""
    whole = rebased(schema, "/$defs/whole")
    pending = deque(parts(schema))
    while pending and time.monotonic() < until:
        place, part = pending.popleft()
        reference = quote(f"#/$defs/whole{pointer}{place}", safe="#/$~")
        referring = {"$defs": {"whole": whole}, "$ref": reference}
        if error_of(referring) == error:
            pointer += place
            pending = deque(parts(part) if isinstance(part, dict) else ())
    return pointer


def _mapped(schema: Any, change: Callable[[Schema], Schema | bool]) -> Any:
    """The schema with each part of it changed."""
    if not isinstance(schema, dict):
        return schema
    found = change(schema)
    if isinstance(found, bool):
        return found
    changed = dict(found)
    for key, value in changed.items():
        if key in _SINGLE and isinstance(value, dict):
            changed[key] = _mapped(value, change)
        elif key in _LISTS and isinstance(value, list):
            changed[key] = [_mapped(each, change) for each in value]
        elif key in _MAPS and isinstance(value, dict):
            changed[key] = {name: _mapped(each, change) for name, each in value.items()}
    return changed


def _simplified(budget: list[int], schema: Schema) -> Schema | bool:
    """`budget`: the characters that may still be repeated."""
    if allows_nothing(schema):
        return False
    if "unevaluatedProperties" in schema and not any(key in schema for key in _EVALUATING):
        others = schema["unevaluatedProperties"]
        schema = {key: value for key, value in schema.items() if key != "unevaluatedProperties"}
        schema.setdefault("additionalProperties", others)
    if "propertyNames" in schema:
        schema = _with_named_members(schema, budget)
    pattern = schema.get("pattern")
    if schema.get("format") == "email" and isinstance(pattern, str):
        begin, _, rest = pattern.partition(_EMAIL_LOOK_AHEAD)
        schema = {**schema, "pattern": f"^{rest}"} if not begin and rest else schema
    return schema


def _with_named_members(schema: Schema, budget: list[int]) -> Schema:
    """A schema whose `propertyNames` are any texts, a list of texts, or the texts of a pattern,
    without this keyword; others stay as they are, and lists beyond the budget."""
    names = schema["propertyNames"]
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    if names is True:
        return rest
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return schema
    demands = names.keys() - {"type", *_ANNOTATIONS}
    if not demands:
        return rest
    if any(key in schema for key in ("properties", "patternProperties")) or len(demands) > 1:
        return schema
    others = rest.get("additionalProperties", {})
    match names:
        case {"enum": [*listed]} if all(isinstance(name, str) for name in listed):
            # Lists within each other multiply, so the schemas that they repeat have a limit.
            if budget[0] >= 0:
                budget[0] -= len(listed) * len(json.dumps(others))
            if budget[0] < 0:
                return schema
            members: Schema = {"properties": dict.fromkeys(listed, others)}
        case {"const": str(name)}:
            members = {"properties": {name: others}}
        case {"pattern": str(pattern)}:
            members = {"patternProperties": {pattern: others}}
        case _:
            return schema
    return {**rest, **members, "additionalProperties": False}


def _without_annotations(schema: Schema) -> Schema:
    dropped = {"$schema", "$id", "x-guidance"}
    form = schema.get("format")
    if isinstance(form, str) and form not in _FORMATS:
        dropped.add("format")
    if schema.get("uniqueItems") is False:
        dropped.add("uniqueItems")
    return {key: value for key, value in schema.items() if key not in dropped}


def _with_integers(schema: Schema) -> Schema:
    """Replaces bounded numbers that are multiples of an integer by integers. llguidance does not
    find the end of such a `number` and fails if only a control token may follow it."""
    divisor, types = schema.get("multipleOf"), schema.get("type", _TYPES)
    types = [types] if isinstance(types, str) else types
    integral = isinstance(divisor, int | float) and divisor % 1 == 0
    if not (integral and isinstance(types, list) and "number" in types):
        return schema
    others = [each for each in types if each not in ("integer", "number")]
    return {**schema, "type": ["integer", *others]}


def _combines(schema: Any) -> bool:
    """Whether a schema combines the properties of several parts in one object."""
    if not isinstance(schema, dict):
        return False
    parts_of_all = schema.get("allOf")
    several = isinstance(parts_of_all, list) and len(parts_of_all) > 1
    beside = "properties" in schema and any(
        key in schema for key in ("allOf", "anyOf", "oneOf", "$ref")
    )
    return several or beside or any(_combines(part) for _, part in parts(schema))


def closed(schema: Schema) -> Schema:
    """The schema without other properties, if it has properties and does not mention others."""
    properties = schema.get("properties")
    others = ("additionalProperties", "patternProperties", "propertyNames", "minProperties")
    if not isinstance(properties, dict) or not properties or any(key in schema for key in others):
        return schema
    required = schema.get("required")
    if isinstance(required, list) and not all(name in [*properties] for name in required):
        return schema
    return {**schema, "additionalProperties": False}


def _escaped(name: str) -> str:
    """A name, escaped for a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")

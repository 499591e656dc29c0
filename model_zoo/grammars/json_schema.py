"""JSON schemas of requests: their limits, their form for llguidance, and the place of an error."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

from model_zoo.grammars.equal_schemas import simplified
from model_zoo.grammars.local_references import localised
from model_zoo.grammars.schema_parts import (
    ANNOTATIONS,
    LISTS,
    REFERENCES,
    Schema,
    further_keyword,
    mapped,
    part_at,
    parts,
    typed,
    types_of,
)
from model_zoo.grammars.text_formats import FORMATS
from runtime.errors import RequestError

# Limit of the nesting of parts and of the parts that they refer to. llguidance recurses, and from
# some 3,000 levels on it overflows the stack of a thread.
MAX_LEVELS = 1000
# Limit of the parts of a schema in which parts that describe the same value are merged. llguidance
# merges them before it applies limits of its own.
MAX_MERGED_PARTS = 200_000
MAX_COMPARED = 200_000  # schemas and names that are read to find this number

# As in llama.cpp, white space is limited: small models may never stop writing it.
_OPTIONS = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}", "lenient": False}
# Keywords by which objects mention other members.
_OTHERS = ("additionalProperties", "propertyNames", "minProperties")
# With fixed separators instead of white space, JSON may be an alternative to rules that begin
# alike.
_MERGED = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
}


def check_references(field: str, schema: Any) -> int:
    """About as many parts as the schema has in a grammar. Raises RequestError for a reference to
    another document, for parts that refer to each other too deeply, and for parts that become too
    many where they are merged."""
    schema = localised(schema)
    targets: set[str] = set()
    _check_targets(field, schema, "", targets)
    depths: dict[int, int] = {}
    levels = _depth(schema, depths)
    for target in targets:
        part = part_at(schema, target)
        levels += depths.get(id(part), MAX_LEVELS) if isinstance(part, dict | list) else 1
    if levels > MAX_LEVELS:
        raise RequestError(
            f'field "{field}" has parts that refer to each other {levels:,} levels deep; at most '
            f"{MAX_LEVELS:,} are accepted"
        )
    schema = simplified(schema)
    merged = _merged_parts(schema, schema, {}, [MAX_COMPARED])
    if merged > MAX_MERGED_PARTS:
        raise RequestError(
            f'field "{field}" has parts that describe the same values; when they are merged, it '
            f"has more than {MAX_MERGED_PARTS:,} parts. Simplify it."
        )
    return merged


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
            named = [set(typed(each, "properties", dict)) for each in together]
            budget[0] -= len(together) + sum(map(len, named))
            listed = [len(typed(each, key, list)) for each in together for key in LISTS]
            copied = [part for each in together for part in _further(each, root)]
            copies = sum(_merged_parts(each, root, counts, budget) for each in copied)
            count += (len(set[str]().union(*named)) + sum(listed)) * copies
        counts[id(schema)] = count
    return counts[id(schema)]


def _described_together(schema: Schema, root: Any) -> list[Schema]:
    """The schema and those that it combines, which describe the same value. Alternatives alone, or
    a reference alone, combine nothing."""
    constraints = schema.keys() - {*ANNOTATIONS, "$defs", "definitions", "$schema", "$id"}
    if len(constraints) == 1 and "allOf" not in constraints:
        return [schema]
    found: dict[int, Schema] = {}
    pending: deque[Any] = deque([schema])
    while pending:
        each = pending.popleft()
        if isinstance(each, dict) and id(each) not in found:
            found[id(each)] = each
            for key in ("allOf", "anyOf", "oneOf"):
                pending += typed(each, key, list)
            if "$ref" in each:
                pending.append(part_at(root, each["$ref"]))
    return [*found.values()]


def _further(schema: Schema, root: Any) -> Iterator[Any]:
    """The schemas for members and items that none of its other keywords describes, and the parts
    they refer to."""
    found = [*typed(schema, "patternProperties", dict).values()]
    found += [schema[key] for key in (further_keyword(schema), "items") if key in schema]
    for each in found:
        if isinstance(each, dict):
            yield each
            if "$ref" in each:
                yield part_at(root, each["$ref"])


def _check_targets(field: str, schema: Any, pointer: str, targets: set[str]) -> None:
    if not isinstance(schema, dict):
        return
    for key in REFERENCES:
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
    return any(key in schema for key in REFERENCES) or any(
        refers(part) for _, part in parts(schema)
    )


def compilable(schema: Any, *, merged: bool = False) -> Any:
    """The schema for llguidance: with our options, and without annotations that it refuses.
    `merged`: other rules may begin at the same place and in the same way.

    As in llama.cpp, an object with properties may have no others unless the schema allows them;
    otherwise models may add them without end.
    """
    changed = mapped(mapped(simplified(schema), _without_annotations), _with_integers)
    if not isinstance(changed, dict):
        return changed
    changed = _with_closed_objects(changed)
    return {**changed, "x-guidance": _MERGED if merged else _OPTIONS}


def rebased(schema: Any, pointer: str) -> Any:
    """The schema with references adapted for its use within another schema, at `pointer`."""

    def change(part: Schema) -> Schema:
        moved = {
            key: f"#{pointer}{target[1:]}"
            for key in REFERENCES
            if isinstance(target := part.get(key), str) and (target == "#" or target[:2] == "#/")
        }
        return {**part, **moved}

    return mapped(schema, change)


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


def _without_annotations(schema: Schema) -> Schema:
    dropped = {"$schema", "$id", "x-guidance"}
    form = schema.get("format")
    if isinstance(form, str) and form not in FORMATS:
        dropped.add("format")
    return {key: value for key, value in schema.items() if key not in dropped}


def _with_integers(schema: Schema) -> Schema:
    """Replaces bounded numbers that are multiples of an integer by integers. llguidance does not
    find the end of such a `number` and fails if only a control token may follow it."""
    divisor, types = schema.get("multipleOf"), types_of(schema)
    integral = isinstance(divisor, int | float) and divisor % 1 == 0
    if not integral or "number" not in types:
        return schema
    others = [each for each in types if each not in ("integer", "number")]
    return {**schema, "type": ["integer", *others]}


def _with_closed_objects(root: Schema) -> Schema:
    """The schema with `closed` objects; where several parts describe an object, with the names of
    all of them."""
    combining = {
        id(part): _described_together(part, root) for part in _every(root) if _combines(part)
    }
    combined = {id(part) for together in combining.values() for part in together[1:]}

    def change(part: Schema) -> Schema:
        if id(part) in combined:
            return part
        return _closed_together(combining[id(part)]) if id(part) in combining else closed(part)

    changed: Schema = mapped(root, change)
    return changed


def _every(schema: Any) -> Iterator[Schema]:
    """The schema and its parts."""
    if isinstance(schema, dict):
        yield schema
        for _, part in parts(schema):
            yield from _every(part)


def _combines(schema: Schema) -> bool:
    """Whether a schema combines the properties of several parts in one object."""
    beside = "properties" in schema and any(
        key in schema for key in ("allOf", "anyOf", "oneOf", "$ref")
    )
    return beside or len(typed(schema, "allOf", list)) > 1


def _closed_together(together: list[Schema]) -> Schema:
    """The first of the schemas that describe an object, `closed` to names that none describes."""
    names = [name for each in together for name in typed(each, "properties", dict)]
    required = [name for each in together for name in typed(each, "required", list)]
    if any(key in each for each in together for key in _OTHERS):
        return together[0]
    own = typed(together[0], "properties", dict)
    described = {**own, **{name: {} for name in names if name not in own}}
    found = closed({**together[0], "properties": described, "required": required})
    return {**together[0], **{key: found[key] for key in found if key != "required"}}


def closed(schema: Schema) -> Schema:
    """The schema without other properties, if it has properties or patterns of their names and does
    not mention others."""
    described = {**typed(schema, "properties", dict), **typed(schema, "patternProperties", dict)}
    if not described or any(key in schema for key in _OTHERS):
        return schema
    properties, required = typed(schema, "properties", dict), typed(schema, "required", list)
    if not all(isinstance(name, str) and name in properties for name in required):
        return schema
    return {**schema, "additionalProperties": False}

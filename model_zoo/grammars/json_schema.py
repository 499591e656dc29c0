"""JSON schemas of requests: their parts, references among them, and what is an annotation."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

from runtime.errors import RequestError

Schema = dict[str, Any]

# Keywords whose value is a schema, a list of schemas, or schemas by name.
_SINGLE = (
    "items additionalItems additionalProperties unevaluatedItems unevaluatedProperties "
    "contains propertyNames not if then else"
).split()
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Formats that llguidance enforces. The specification lets others be annotations.
_FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
# As in llama.cpp: small models do not stop writing white space by themselves.
_OPTIONS = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}", "lenient": False}


def parts(schema: Schema) -> Iterator[tuple[str, Any]]:
    """The schemas directly within `schema`, with their JSON pointers."""
    for key, value in schema.items():
        if key in _SINGLE and isinstance(value, dict):
            yield f"/{key}", value
        elif key in _LISTS and isinstance(value, list):
            yield from ((f"/{key}/{index}", each) for index, each in enumerate(value))
        elif key in _MAPS and isinstance(value, dict):
            yield from ((f"/{key}/{_escaped(name)}", each) for name, each in value.items())


def check_references(field: str, schema: Any, pointer: str = "") -> None:
    """Raises RequestError for a reference to another document."""
    if not isinstance(schema, dict):
        return
    for key in _REFERENCES:
        target = schema.get(key)
        if target is not None and not (isinstance(target, str) and target.startswith("#")):
            raise RequestError(
                f'field "{field}": "{key}" at "{pointer}" is {str(target)[:80]!r}; only references '
                'within the schema, which begin with "#", are accepted'
            )
    for place, part in parts(schema):
        check_references(field, part, pointer + place)


def compilable(schema: Any) -> Any:
    """The schema as llguidance takes it: with our options, without annotations that it refuses.

    As in llama.cpp, an object with properties has no others, unless the schema says so: models
    would invent more and more of them.
    """
    changed = _mapped(schema, _without_annotations)
    if not _combines(changed):
        changed = _mapped(changed, _closed)
    return {**changed, "x-guidance": _OPTIONS} if isinstance(changed, dict) else changed


def rebased(schema: Any, pointer: str) -> Any:
    """The schema for a place within another one, `pointer` from its root."""

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


def _mapped(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """The schema with each part of it changed."""
    if not isinstance(schema, dict):
        return schema
    changed = dict(change(schema))
    for key, value in changed.items():
        if key in _SINGLE and isinstance(value, dict):
            changed[key] = _mapped(value, change)
        elif key in _LISTS and isinstance(value, list):
            changed[key] = [_mapped(each, change) for each in value]
        elif key in _MAPS and isinstance(value, dict):
            changed[key] = {name: _mapped(each, change) for name, each in value.items()}
    return changed


def _without_annotations(schema: Schema) -> Schema:
    dropped = {"$schema", "$id", "x-guidance"}
    form = schema.get("format")
    if isinstance(form, str) and form not in _FORMATS:
        dropped.add("format")
    if schema.get("uniqueItems") is False:
        dropped.add("uniqueItems")
    return {key: value for key, value in schema.items() if key not in dropped}


def _combines(schema: Any) -> bool:
    """Whether properties of several parts belong to one object."""
    if not isinstance(schema, dict):
        return False
    parts_of_all = schema.get("allOf")
    several = isinstance(parts_of_all, list) and len(parts_of_all) > 1
    beside = "properties" in schema and any(
        key in schema for key in ("allOf", "anyOf", "oneOf", "$ref")
    )
    return several or beside or any(_combines(part) for _, part in parts(schema))


def _closed(schema: Schema) -> Schema:
    properties = schema.get("properties")
    others = ("additionalProperties", "patternProperties", "propertyNames", "minProperties")
    if not isinstance(properties, dict) or not properties or any(key in schema for key in others):
        return schema
    required = schema.get("required")
    if isinstance(required, list) and not all(name in [*properties] for name in required):
        return schema
    return {**schema, "additionalProperties": False}


def _escaped(name: str) -> str:
    """A name within a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")

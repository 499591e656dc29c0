"""The parts of a JSON schema: which keywords hold schemas, and where a JSON pointer leads."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

# Keywords whose value is a schema, a list of schemas, or schemas by name.
_SINGLE = (
    "items additionalItems additionalProperties unevaluatedItems unevaluatedProperties "
    "contains propertyNames not if then else"
).split()
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = "properties patternProperties $defs definitions dependentSchemas dependencies".split()
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
DEFINITIONS = ("$defs", "definitions")
ANNOTATIONS = ("title", "description", "default", "examples", "deprecated", "$comment")
TYPES = ("null", "boolean", "number", "string", "array", "object")
# Keywords whose schemas evaluate members of the same object.
_EVALUATING = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")


def parts(schema: Schema) -> Iterator[tuple[str, Any]]:
    """The schemas directly within `schema`, with their JSON pointers."""
    for key, value in schema.items():
        if key in _SINGLE and isinstance(value, dict):
            yield f"/{key}", value
        elif key in LISTS and isinstance(value, list):
            yield from ((f"/{key}/{index}", each) for index, each in enumerate(value))
        elif key in _MAPS and isinstance(value, dict):
            yield from ((f"/{key}/{escaped(name)}", each) for name, each in value.items())


def with_parts(schema: Schema, change: Callable[[str, Any], Any]) -> Schema:
    """The schema with each schema directly within it changed; `change` gets its JSON pointer from
    `schema`, and the part."""
    changed = dict(schema)
    for key, value in schema.items():
        if key in _SINGLE and isinstance(value, dict):
            changed[key] = change(f"/{key}", value)
        elif key in LISTS and isinstance(value, list):
            changed[key] = [change(f"/{key}/{at}", each) for at, each in enumerate(value)]
        elif key in _MAPS and isinstance(value, dict):
            changed[key] = {
                name: change(f"/{key}/{escaped(name)}", each) for name, each in value.items()
            }
    return changed


def mapped(schema: Any, change: Callable[[Schema], Schema | bool]) -> Any:
    """The schema with each part of it changed, outer parts first."""
    if not isinstance(schema, dict):
        return schema
    found = change(schema)
    return (
        found
        if isinstance(found, bool)
        else with_parts(found, lambda _, part: mapped(part, change))
    )


def typed(schema: Any, keyword: str, kind: type) -> Any:
    """The value of a keyword; an empty one if it is absent or has another type."""
    found = schema.get(keyword) if isinstance(schema, dict) else None
    return found if isinstance(found, kind) else kind()


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """The types that the keyword `type` names; all if it is absent. Entries that are not strings
    are left out."""
    types = schema.get("type", list(TYPES))
    listed = [types] if isinstance(types, str) else types if isinstance(types, list) else []
    return [each for each in listed if isinstance(each, str)]


def steps_of(reference: str) -> list[str]:
    """The steps of a JSON pointer in a reference (RFC 6901)."""
    steps = unquote(reference.partition("#")[2]).split("/")[1:]
    return [step.replace("~1", "/").replace("~0", "~") for step in steps]


def located(schema: Any, steps: list[str]) -> tuple[str, Any] | None:
    """The part of a schema that the steps of a JSON pointer lead to, and its pointer without
    zeros before the indices of lists. None if there is none."""
    part, pointer = schema, ""
    for step in steps:
        try:
            at = int(step) if isinstance(part, list) else step
            part = part[at]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
        pointer += f"/{escaped(str(at))}"
    return pointer, part


def part_at(schema: Any, reference: str) -> Any:
    """The part of a schema that a reference within it leads to; None if there is none."""
    found = located(schema, steps_of(reference))
    return None if found is None else found[1]


def escaped(name: str) -> str:
    """A name, escaped for a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def allows_nothing(schema: Any) -> bool:
    """Whether a schema excludes all values: `false`, or `not` of a schema that allows all."""
    return schema is False or (isinstance(schema, Mapping) and schema.get("not") in ({}, True))


def further_keyword(schema: Mapping[str, Any]) -> str | None:
    """The keyword with the schema of the members that no other keyword of an object's schema names:
    `additionalProperties`, or `unevaluatedProperties` where nothing else evaluates any. None if the
    schema has neither."""
    keywords = ["additionalProperties"]
    if not any(key in schema for key in _EVALUATING):
        keywords.append("unevaluatedProperties")
    return next((key for key in keywords if key in schema), None)

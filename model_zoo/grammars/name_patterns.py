"""Rewrites `patternProperties` that overlap, which grammars refuse."""

from collections.abc import Callable
from typing import Any

from model_zoo.grammars.negation import canonical
from model_zoo.grammars.schema_parts import Schema, typed

# Patterns that every name matches.
_EVERY = ("", "^", "$", ".*", "^.*", ".*$", "^.*$", "[\\s\\S]*", "^[\\s\\S]*$")
_ANY = "[\\s\\S]*"


def apart(schema: Schema, spend: Callable[..., bool]) -> Schema:
    """An equivalent schema in which fewer patterns overlap: those with the same schema are one, and
    the schema of a pattern that every name matches is that of all further members, and also one
    of the declared and matched ones. `spend` takes the length of what is repeated, how many times,
    and returns whether that is within the limit."""
    patterns = typed(schema, "patternProperties", dict)
    if len(patterns) < 2:
        return schema
    every = [patterns[each] for each in patterns if each in _EVERY]
    others = {name: part for name, part in patterns.items() if name not in _EVERY}
    if every:
        declared = typed(schema, "properties", dict)
        if not spend(every, len(others) + len(declared)):
            return schema
        others = {name: _all_of([part, *every]) for name, part in others.items()}
        schema = {**schema, "additionalProperties": _all_of(every)}
        if declared:
            members = {name: _all_of([part, *every]) for name, part in declared.items()}
            schema["properties"] = members
    rest = {key: value for key, value in schema.items() if key != "patternProperties"}
    return {**rest, "patternProperties": _joined(others)} if others else rest


def _joined(patterns: dict[str, Any]) -> dict[str, Any]:
    """The patterns, of which those with the same schema are one."""
    found: dict[str, list[str]] = {}
    for pattern, part in patterns.items():
        found.setdefault(canonical(part), []).append(pattern)
    joined = {}
    for same in found.values():
        whole = [_whole(each) for each in same]
        part = patterns[same[0]]
        if len(same) > 1 and None not in whole:
            joined[f"^(?:{'|'.join(filter(None, whole))})$"] = part
        else:
            joined |= dict.fromkeys(same, part)
    return joined


def _whole(pattern: str) -> str | None:
    """A regular expression that matches the whole of each text in which `pattern` is found; None
    if it has anchors or look-around in other places than its ends."""
    body = pattern.removeprefix("^")
    first = body != pattern
    last = body.endswith("$") and not body.endswith("\\$")
    body = body[:-1] if last else body
    if any(mark in body for mark in ("^", "$", "\\b", "\\B", "(?")) or (
        (first or last) and "|" in body
    ):
        return None
    return f"{'' if first else _ANY}(?:{body}){'' if last else _ANY}"


def _all_of(parts: list[Any]) -> Any:
    needed = [each for each in parts if each not in (True, {})]
    if len(needed) < 2:
        return needed[0] if needed else True
    return {"allOf": needed}

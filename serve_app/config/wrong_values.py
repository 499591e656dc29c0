"""What values must be, for error messages: in the terms of JSON and YAML instead of Python's."""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

_SPELLING = "spelling"
_LONGEST_SHOWN = 60

# What a value must be, by pydantic's name of the error.
REQUIRED_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "string_type": "a string",
        "bool_type": "a boolean",
        "bool_parsing": "a boolean",
        "int_type": "an integer",
        "int_parsing": "an integer",
        "int_from_float": "an integer",
        "float_type": "a number",
        "float_parsing": "a number",
        "list_type": "a list",
        "tuple_type": "a list",
        "dict_type": "an object",
        "model_type": "an object",
    }
)
# The same for limits, with a place for the limit.
_LIMITS: Mapping[str, str] = MappingProxyType(
    {
        "greater_than_equal": "at least {}",
        "greater_than": "above {}",
        "less_than_equal": "at most {}",
        "less_than": "below {}",
        "finite_number": "a finite number",
    }
)


def spelled(pattern: str, allowed: str) -> AfterValidator:
    """Refuses a string that `pattern` does not match. `allowed`: the matching strings in words,
    with an article."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise PydanticCustomError(_SPELLING, "must be {allowed}", {"allowed": allowed})
        return text

    return AfterValidator(check)


def requirement(details: Mapping[str, Any]) -> str | None:
    """What the value in an error of pydantic must be; None for errors with our own message."""
    kind, context = details["type"], details.get("ctx", {})
    if kind in _LIMITS:
        return _LIMITS[kind].format(*map(_number, context.values()))
    match kind:
        case "literal_error":
            return re.sub(r"'([^']*)'", r"\1", context["expected"])
        case "string_too_short":
            return _sized("string", context["min_length"], "characters")
        case "too_short":
            return _sized("list", context["min_length"], "entries")
        case "too_long":
            return f"a list of at most {context['max_length']:,} entries"
        case _ if kind == _SPELLING:
            return str(context["allowed"])
    return REQUIRED_TYPES.get(kind)


def repeats(details: Mapping[str, Any]) -> bool:
    """Whether an error follows from those of a list's items: pydantic counts only valid ones."""
    least = details.get("ctx", {}).get("min_length", 0)
    return details["type"] == "too_short" and len(details["input"]) >= least


def shown(value: Any) -> str:
    """A value as JSON, shortened if it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):  # YAML also has dates as keys, and lists in themselves
        text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _sized(kind: str, least: int, parts: str) -> str:
    return f"a non-empty {kind}" if least == 1 else f"a {kind} of at least {least:,} {parts}"


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"

"""What values must be, in errors: in the terms of JSON and YAML instead of Python's."""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

_SPELLING = "spelling"
_LONGEST_SHOWN = 60

# What a value must be, by pydantic's name of the error that it is not.
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
# The same for limits.
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
    """Refuses a text that a regular expression does not match; `allowed`: the matching texts in
    words, with an article."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise PydanticCustomError(_SPELLING, "must be {allowed}", {"allowed": allowed})
        return text

    return AfterValidator(check)


def requirement(details: Mapping[str, Any]) -> str | None:
    """What the value of an error of pydantic must be; None for errors with a message of ours."""
    kind, context = details["type"], details.get("ctx", {})
    if kind in _LIMITS:
        return _LIMITS[kind].format(*map(_number, context.values()))
    match kind:
        case "literal_error":
            return re.sub(r"'([^']*)'", r"\1", context["expected"])
        case "string_too_short":
            return f"a text of at least {context['min_length']:,} characters"
        case "too_short":
            return f"a list of at least {context['min_length']:,}"
        case "too_long":
            return f"a list of at most {context['max_length']:,}"
        case _ if kind == _SPELLING:
            return str(context["allowed"])
    return REQUIRED_TYPES.get(kind)


def repeats(details: Mapping[str, Any]) -> bool:
    """Whether an error follows from those of a list's items: pydantic counts only valid ones."""
    least = details.get("ctx", {}).get("min_length", 0)
    return details["type"] == "too_short" and len(details["input"]) >= least


def shown(value: Any) -> str:
    """A value as JSON, cut if it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):  # YAML also has dates as keys, and lists in themselves
        text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"

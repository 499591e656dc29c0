"""`keep_alive`: how long a model stays loaded after its last request, in the form of requests."""

import math
import re
from typing import Any

from runtime.errors import RequestError

FOREVER = math.inf
# Longer durations are treated as infinite.
LONGEST_S = 100 * 365 * 24 * 3600.0
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"[+-]?(?:0|(?:{_PART.pattern})+)")
_MAX_CHARACTERS = 100


def keep_alive_s(value: Any) -> float | None:
    """Seconds; `FOREVER` for a negative value; None for None.

    A number is in seconds; a string is a duration in Go's format, such as "10m" or "1h30m".
    RequestError for anything else.
    """
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _bounded(value)
    if not isinstance(value, str):
        raise RequestError(f"Unsupported type: '{type(value).__name__}' for keep_alive")
    if len(value) > _MAX_CHARACTERS or not _DURATION.fullmatch(value):
        raise RequestError(
            f'invalid keep_alive "{value[:_MAX_CHARACTERS]}": expected a duration such as "10m"'
        )
    seconds = sum(float(count) * _UNITS_S[unit] for count, unit in _PART.findall(value))
    return _bounded(-seconds if value.startswith("-") else seconds)


def _bounded(seconds: float) -> float:
    return float(seconds) if 0 <= seconds < LONGEST_S else FOREVER

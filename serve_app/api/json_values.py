"""Limits of JSON values that requests carry to replicas."""

from typing import Any

import msgspec

from runtime.errors import RequestError

MAX_DEPTH = 32


def check_value(field: str, value: Any, *, max_bytes: int) -> None:
    """Raises RequestError for a value that is too large, nests too deeply, or has a number that
    msgpack cannot carry."""
    too_deep = f'field "{field}" is nested more than {MAX_DEPTH} deep'
    try:
        size = len(msgspec.json.encode(value))
    except RecursionError:
        raise RequestError(too_deep) from None
    if size > max_bytes:
        raise RequestError(
            f'field "{field}" has {size:,} bytes as JSON; at most {max_bytes:,} are accepted'
        )
    _check(field, value, too_deep, depth=0)


def _check(field: str, value: Any, too_deep: str, *, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise RequestError(too_deep)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise RequestError(f'field "{field}" has a number of more than 64 bits')
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        _check(field, item, too_deep, depth=depth + 1)

"""JSON texts of clients, and limits of the values that requests carry to replicas."""

import re
from typing import Any, TypeVar

import msgspec

from model_zoo.chat.formats.scanner import finite
from runtime.errors import RequestError

MAX_DEPTH = 32
# Escapes in order: a surrogate pair, half of one, any other.
_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)

Value = TypeVar("Value")


def decoded_json(text: bytes | bytearray | str) -> Any:
    """The value of a JSON text in UTF-8. Raises RequestError with the reason for other texts."""
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        reason = "it is nested too deeply"
    except (msgspec.DecodeError, UnicodeError) as error:
        encoded = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        reason = _reason(encoded, error)
    raise RequestError(f"invalid JSON: {reason}")


def check_value(field: str, value: Any, *, max_bytes: int) -> None:
    """Raises RequestError for a value that is too large, nests too deeply, or has a number that
    msgpack cannot carry."""
    if _is_wide(field, value, max_bytes):
        raise RequestError(f'field "{field}" has a number of more than 64 bits')


def carried(field: str, value: Any, *, max_bytes: int) -> Any:
    """The value with the nearest floats instead of integers of more than 64 bits, which models may
    write but msgpack cannot carry. Raises RequestError as `check_value` does for others."""
    return _narrow(value) if _is_wide(field, value, max_bytes) else value


def converted(place: str, value: Any, kind: type[Value]) -> Value:
    """The value of a client's field as `kind`. Raises RequestError that names the place."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RequestError(f'field "{place}" is wrong: {error}') from None


def _is_wide(field: str, value: Any, max_bytes: int) -> bool:
    """Whether the value has an integer of more than 64 bits."""
    too_deep = f'field "{field}" is nested more than {MAX_DEPTH} deep'
    try:
        size = len(msgspec.json.encode(value))
    except RecursionError:
        raise RequestError(too_deep) from None
    if size > max_bytes:
        raise RequestError(
            f'field "{field}" has {size:,} bytes as JSON; at most {max_bytes:,} are accepted'
        )
    return _has_wide(value, too_deep, depth=0)


def _reason(text: bytes | bytearray, error: Exception) -> str:
    """Why a text is not JSON. msgspec reports half of a surrogate pair as the text's end or as a
    malformed escape, and bytes that are not UTF-8 by their place in their string."""
    halves = (each for each in _ESCAPES.finditer(text) if each["half"] is not None)
    half = next(halves, None)
    if half is not None:
        return (
            f"the escape {half[0].decode()} (byte {half.start()}) is half of a UTF-16 surrogate "
            "pair; only both halves together are a character"
        )
    try:
        text.decode()
    except UnicodeDecodeError as unicode_error:
        at = unicode_error.start
        return f"byte {at} is {text[at]:#04x}, which is not UTF-8"
    return str(error)


def _has_wide(value: Any, too_deep: str, *, depth: int) -> bool:
    if depth > MAX_DEPTH:
        raise RequestError(too_deep)
    if isinstance(value, int):
        return not -(2**63) <= value < 2**63
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    wide = [_has_wide(item, too_deep, depth=depth + 1) for item in items]  # all, for the depth
    return any(wide)


def _narrow(value: Any) -> Any:
    match value:
        case dict():
            return {name: _narrow(item) for name, item in value.items()}
        case list():
            return [*map(_narrow, value)]
        case int() if not -(2**63) <= value < 2**63:
            return finite(str(value))
    return value

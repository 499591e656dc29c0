"""Calls in Python's notation: `name(key=value, …)`, in a list or on lines. Values are literals of
Python or JSON."""

import json

from model_zoo.chat.formats.calls import Calls
from model_zoo.chat.formats.source import MAX_DEPTH, Emit, Malformed, Source, Steps, encoded, finite

CONSTANTS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "0": "\0",
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "/": "/",
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def call_list(source: Source, calls: Calls) -> Steps[None]:
    """`[name(key=value, …), …]`, with at least one call."""
    yield from source.expect("[")
    yield from source.space()
    yield from calls_after(source, calls, (yield from _opened_name(source)))


def calls_after(source: Source, calls: Calls, name: str) -> Steps[None]:
    """The rest of a list of calls after `[name(`."""
    while True:
        yield from _arguments(source, calls, name)
        yield from source.space()
        if (yield from source.expect(",", "]")) == "]":
            return
        yield from source.space()
        name = yield from _opened_name(source)


def call(source: Source, calls: Calls) -> Steps[None]:
    """`name(key=value, …)`."""
    yield from _arguments(source, calls, (yield from _opened_name(source)))


def call_lines(source: Source, calls: Calls) -> Steps[None]:
    """`name(key=value, …)`, at least once, with white space between calls."""
    while True:
        yield from call(source, calls)
        yield from source.space()
        if (yield from source.peek()) in ("", "<", "`"):
            return


def _opened_name(source: Source) -> Steps[str]:
    name = yield from source.while_in(_in_name)
    yield from source.expect("(")
    return name


def _arguments(source: Source, calls: Calls, name: str) -> Steps[None]:
    """The rest of a call after `name(`. The arguments are passed on as they arrive."""
    calls.begin(name)
    calls.arguments("{")
    separator = ""
    yield from source.space()
    while not (yield from source.starts_with((")",))):
        key = yield from source.while_in(_in_identifier)
        yield from source.space()
        yield from source.expect("=")
        yield from source.space()
        if not key:
            raise Malformed
        calls.arguments(f"{separator}{encoded(key)}: ")
        separator = ", "
        yield from value(source, calls.arguments)
        yield from source.space()
        if (yield from source.expect(",", ")")) == ")":
            break
        yield from source.space()
    calls.arguments("}")
    calls.end()


def value(source: Source, emit: Emit, depth: int = 0) -> Steps[None]:
    """A literal; its JSON is emitted as it arrives. `depth`: number of lists and dicts around
    it."""
    first = yield from source.peek()
    if first in ("'", '"'):
        yield from _string(source, emit)
    elif first in ("[", "{", "("):
        if depth == MAX_DEPTH:
            raise Malformed
        yield from _container(source, emit, depth)
    else:
        emit(_scalar((yield from source.while_in(_in_scalar))))


def _container(source: Source, emit: Emit, depth: int) -> Steps[None]:
    opener = yield from source.expect("[", "{", "(")
    closer = {"[": "]", "{": "}", "(": ")"}[opener]
    emit("{" if opener == "{" else "[")
    separator = ""
    yield from source.space()
    while not (yield from source.starts_with((closer,))):
        emit(separator)
        separator = ", "
        if opener == "{":
            yield from _string(source, emit)
            yield from source.space()
            yield from source.expect(":")
            yield from source.space()
            emit(": ")
        yield from value(source, emit, depth + 1)
        yield from source.space()
        if (yield from source.expect(",", closer)) == closer:
            break
        yield from source.space()
    emit("}" if opener == "{" else "]")


def _string(source: Source, emit: Emit) -> Steps[None]:
    """A text between single or double quotes, with Python's escapes; emitted as a JSON string."""
    quote = yield from source.expect("'", '"')
    emit('"')
    while True:
        found = yield from source.until((quote, "\\"), lambda text: emit(encoded(text)[1:-1]))
        if found is None:
            raise Malformed
        if found[1] == quote:
            break
        emit(json.dumps((yield from _escaped(source)))[1:-1])
    emit('"')


def _escaped(source: Source) -> Steps[str]:
    """The character that follows a backslash; an unknown escape stands for itself."""
    kind = yield from source.peek()
    if not kind:
        raise Malformed
    source.take(1)
    if kind not in _HEX_DIGITS:
        return _ESCAPES.get(kind, "\\" + kind)
    digits = ""
    while len(digits) < _HEX_DIGITS[kind]:
        digit = yield from source.peek()
        if not digit or digit not in "0123456789abcdefABCDEF":
            raise Malformed
        digits += source.take(1)
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:  # not a valid character
        raise Malformed
    return chr(code)


def _scalar(text: str) -> str:
    """The JSON of a number or constant."""
    if text in CONSTANTS:
        return CONSTANTS[text]
    if text.lstrip("+-")[:1].isalpha():  # NaN and Infinity are not JSON
        raise Malformed
    try:
        whole = text.lstrip("+-").isdecimal()
        return json.dumps(int(text) if whole else finite(text))
    except ValueError:
        raise Malformed from None


def _in_name(char: str) -> bool:
    return _in_identifier(char) or char in ".-:/"


def _in_identifier(char: str) -> bool:
    return char.isalnum() or char == "_"


def _in_scalar(char: str) -> bool:
    return char.isalnum() or char in "+-._"

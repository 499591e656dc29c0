"""Calls in Python's notation: `name(key=value, …)`, in a list or on lines. Values are literals of
Python or JSON."""

import json

from model_zoo.chat.formats.calls import Calls
from model_zoo.chat.formats.scanner import (
    MAX_DEPTH,
    Emit,
    Malformed,
    Scanner,
    Steps,
    encoded,
    finite,
)

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


def call_list(scanner: Scanner, calls: Calls) -> Steps[None]:
    """`[name(key=value, …), …]`, with at least one call."""
    yield from scanner.expect("[")
    yield from scanner.space()
    yield from calls_after(scanner, calls, (yield from _opened_name(scanner)))


def calls_after(scanner: Scanner, calls: Calls, name: str) -> Steps[None]:
    """The rest of a list of calls after `[name(`."""
    while True:
        yield from _arguments(scanner, calls, name)
        yield from scanner.space()
        if (yield from scanner.expect(",", "]")) == "]":
            return
        yield from scanner.space()
        name = yield from _opened_name(scanner)


def call(scanner: Scanner, calls: Calls) -> Steps[None]:
    """`name(key=value, …)`."""
    yield from _arguments(scanner, calls, (yield from _opened_name(scanner)))


def call_lines(scanner: Scanner, calls: Calls) -> Steps[None]:
    """`name(key=value, …)`, at least once, with white space between calls."""
    while True:
        yield from call(scanner, calls)
        yield from scanner.space()
        if (yield from scanner.peek()) in ("", "<", "`"):
            return


def _opened_name(scanner: Scanner) -> Steps[str]:
    name = yield from scanner.while_in(_in_name)
    yield from scanner.expect("(")
    return name


def _arguments(scanner: Scanner, calls: Calls, name: str) -> Steps[None]:
    """The rest of a call after `name(`. The arguments are passed on as they arrive."""
    calls.begin(name)
    calls.arguments("{")
    separator = ""
    yield from scanner.space()
    while not (yield from scanner.starts_with((")",))):
        key = yield from scanner.while_in(_in_identifier)
        yield from scanner.space()
        yield from scanner.expect("=")
        yield from scanner.space()
        if not key:
            raise Malformed
        calls.arguments(f"{separator}{encoded(key)}: ")
        separator = ", "
        yield from value(scanner, calls.arguments)
        yield from scanner.space()
        if (yield from scanner.expect(",", ")")) == ")":
            break
        yield from scanner.space()
    calls.arguments("}")
    calls.end()


def value(scanner: Scanner, emit: Emit, depth: int = 0) -> Steps[None]:
    """A literal; its JSON is emitted as it arrives. `depth`: number of lists and dicts around
    it."""
    first = yield from scanner.peek()
    if first in ("'", '"'):
        yield from _string(scanner, emit)
    elif first in ("[", "{", "("):
        if depth == MAX_DEPTH:
            raise Malformed
        yield from _container(scanner, emit, depth)
    else:
        emit(_scalar((yield from scanner.while_in(_in_scalar))))


def _container(scanner: Scanner, emit: Emit, depth: int) -> Steps[None]:
    opener = yield from scanner.expect("[", "{", "(")
    closer = {"[": "]", "{": "}", "(": ")"}[opener]
    emit("{" if opener == "{" else "[")
    separator = ""
    yield from scanner.space()
    while not (yield from scanner.starts_with((closer,))):
        emit(separator)
        separator = ", "
        if opener == "{":
            yield from _string(scanner, emit)
            yield from scanner.space()
            yield from scanner.expect(":")
            yield from scanner.space()
            emit(": ")
        yield from value(scanner, emit, depth + 1)
        yield from scanner.space()
        if (yield from scanner.expect(",", closer)) == closer:
            break
        yield from scanner.space()
    emit("}" if opener == "{" else "]")


def _string(scanner: Scanner, emit: Emit) -> Steps[None]:
    """A text between single or double quotes, with Python's escapes; emitted as a JSON string."""
    quote = yield from scanner.expect("'", '"')
    emit('"')
    while True:
        found = yield from scanner.until((quote, "\\"), lambda text: emit(encoded(text)[1:-1]))
        if found is None:
            raise Malformed
        if found[1] == quote:
            break
        emit(json.dumps((yield from _escaped(scanner)))[1:-1])
    emit('"')


def _escaped(scanner: Scanner) -> Steps[str]:
    """The character that follows a backslash; an unknown escape stands for itself."""
    kind = yield from scanner.peek()
    if not kind:
        raise Malformed
    scanner.take(1)
    if kind not in _HEX_DIGITS:
        return _ESCAPES.get(kind, "\\" + kind)
    digits = ""
    while len(digits) < _HEX_DIGITS[kind]:
        digit = yield from scanner.peek()
        if not digit or digit not in "0123456789abcdefABCDEF":
            raise Malformed
        digits += scanner.take(1)
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

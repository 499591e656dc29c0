"""Gemma 4's tool calls: `call:NAME{key:value,...}`, with strings between `<|"|>` marks.

White space may stand around every part; the models write it in some calls, their template none.
"""

from model_zoo.chat.formats.calls import Calls, json_string
from model_zoo.chat.formats.pythonic import CONSTANTS
from model_zoo.chat.formats.source import (
    MAX_DEPTH,
    Emit,
    Malformed,
    Source,
    Steps,
    decoded,
    encoded,
)

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'


def read_call(source: Source, calls: Calls) -> Steps[None]:
    """After `OPEN`. The models sometimes write `CLOSE` several times."""
    yield from source.space()
    yield from source.expect("call:")
    name = yield from source.while_in(lambda char: char not in "{<")
    calls.begin(name.strip())
    yield from _object(source, calls.arguments, 0)
    calls.end()
    yield from source.space()
    while (yield from source.closing((CLOSE,))):
        yield from source.space()


def _object(source: Source, emit: Emit, depth: int) -> Steps[None]:
    emit((yield from source.expect("{")))
    separator = ""
    yield from source.space()
    while not (yield from source.starts_with(("}",))):
        emit(f"{separator}{encoded((yield from _key(source)))}: ")
        separator = ", "
        yield from source.space()
        yield from _value(source, emit, depth)
        if (yield from _next(source, "}")) == "}":
            break
    emit("}")


def _key(source: Source) -> Steps[str]:
    if (yield from source.starts_with((QUOTE,))):
        pieces: list[str] = []
        yield from _quoted(source, pieces.append)
        key = "".join(pieces)
    elif (yield from source.peek()) == '"':
        key = yield from json_string(source)
    else:
        key = (yield from source.while_in(lambda char: char not in ":{}[],<")).strip()
    yield from source.space()
    yield from source.expect(":")
    return key


def _value(source: Source, emit: Emit, depth: int) -> Steps[None]:
    if (yield from source.starts_with((QUOTE,))):
        emit('"')
        yield from _quoted(source, lambda text: emit(encoded(text)[1:-1]))
        emit('"')
        return
    first = yield from source.peek()
    if first == '"':
        yield from source.json(emit)
        return
    if first in ("{", "["):
        if depth == MAX_DEPTH:
            raise Malformed
        yield from (_object if first == "{" else _list)(source, emit, depth + 1)
        return
    text = (yield from source.while_in(lambda char: char not in ",}]<")).strip()
    emit(encoded(decoded(CONSTANTS.get(text, text))))


def _list(source: Source, emit: Emit, depth: int) -> Steps[None]:
    emit((yield from source.expect("[")))
    separator = ""
    yield from source.space()
    while not (yield from source.starts_with(("]",))):
        emit(separator)
        separator = ", "
        yield from _value(source, emit, depth)
        if (yield from _next(source, "]")) == "]":
            break
    emit("]")


def _next(source: Source, closer: str) -> Steps[str]:
    """Consumes a comma or `closer`, with white space around it."""
    yield from source.space()
    found = yield from source.expect(",", closer)
    if found == ",":
        yield from source.space()
    return found


def _quoted(source: Source, emit: Emit) -> Steps[None]:
    if (yield from source.until((QUOTE,), emit)) is None:
        raise Malformed

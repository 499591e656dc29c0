"""Gemma 4's tool calls: `call:NAME{key:value,...}`, with strings between `<|"|>` marks."""

from model_zoo.chat.formats.calls import Calls
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
    yield from source.expect("call:")
    name = yield from source.while_in(lambda char: char not in "{<")
    calls.begin(name)
    yield from _object(source, calls.arguments, 0)
    calls.end()
    yield from source.starts_with((CLOSE,))


def _object(source: Source, emit: Emit, depth: int) -> Steps[None]:
    emit((yield from source.expect("{")))
    if (yield from source.starts_with(("}",))):
        emit("}")
        return
    while True:
        emit(encoded((yield from _key(source))) + ": ")
        yield from _value(source, emit, depth)
        if (yield from source.expect(",", "}")) == "}":
            emit("}")
            return
        emit(", ")


def _key(source: Source) -> Steps[str]:
    if (yield from source.starts_with((QUOTE,))):
        pieces: list[str] = []
        yield from _quoted(source, pieces.append)
        key = "".join(pieces)
    else:
        key = (yield from source.while_in(lambda char: char not in ":{}[],<")).strip()
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
    text = yield from source.while_in(lambda char: char not in ",}]<")
    text = "null" if text == "None" else text  # as the template renders it
    decoded(text)
    emit(text)


def _list(source: Source, emit: Emit, depth: int) -> Steps[None]:
    emit((yield from source.expect("[")))
    if (yield from source.starts_with(("]",))):
        emit("]")
        return
    while True:
        yield from _value(source, emit, depth)
        if (yield from source.expect(",", "]")) == "]":
            emit("]")
            return
        emit(", ")


def _quoted(source: Source, emit: Emit) -> Steps[None]:
    if (yield from source.until((QUOTE,), emit)) is None:
        raise Malformed

"""Calls of Gemma 4 and FunctionGemma: `call:NAME{key:value,...}`, with strings between marks.

White space may stand around every part; the models write it in some calls, their template none.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """The markers around a call, and the mark at both ends of a string."""

    open: str
    close: str
    quote: str

    @property
    def markers(self) -> tuple[str, ...]:
        return self.open, self.close, self.quote

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        """A call after `open`. The models sometimes write `close` several times."""
        yield from source.space()
        yield from source.expect("call:")
        name = yield from source.while_in(lambda char: char not in "{<")
        calls.begin(name.strip())
        yield from self._object(source, calls.arguments, 0)
        calls.end()
        yield from source.space()
        while (yield from source.closing((self.close,))):
            yield from source.space()

    def _object(self, source: Source, emit: Emit, depth: int) -> Steps[None]:
        emit((yield from source.expect("{")))
        separator = ""
        yield from source.space()
        while not (yield from source.starts_with(("}",))):
            emit(f"{separator}{encoded((yield from self._key(source)))}: ")
            separator = ", "
            yield from source.space()
            yield from self._value(source, emit, depth)
            if (yield from _next(source, "}")) == "}":
                break
        emit("}")

    def _key(self, source: Source) -> Steps[str]:
        if (yield from source.starts_with((self.quote,))):
            pieces: list[str] = []
            yield from self._quoted(source, pieces.append)
            key = "".join(pieces)
        elif (yield from source.peek()) == '"':
            key = yield from json_string(source)
        else:
            key = (yield from source.while_in(lambda char: char not in ":{}[],<")).strip()
        yield from source.space()
        yield from source.expect(":")
        return key

    def _value(self, source: Source, emit: Emit, depth: int) -> Steps[None]:
        if (yield from source.starts_with((self.quote,))):
            emit('"')
            yield from self._quoted(source, lambda text: emit(encoded(text)[1:-1]))
            emit('"')
            return
        first = yield from source.peek()
        if first == '"':
            yield from source.json(emit)
            return
        if first in ("{", "["):
            if depth == MAX_DEPTH:
                raise Malformed
            yield from (self._object if first == "{" else self._list)(source, emit, depth + 1)
            return
        text = (yield from source.while_in(lambda char: char not in ",}]<")).strip()
        emit(encoded(decoded(CONSTANTS.get(text, text))))

    def _list(self, source: Source, emit: Emit, depth: int) -> Steps[None]:
        emit((yield from source.expect("[")))
        separator = ""
        yield from source.space()
        while not (yield from source.starts_with(("]",))):
            emit(separator)
            separator = ", "
            yield from self._value(source, emit, depth)
            if (yield from _next(source, "]")) == "]":
                break
        emit("]")

    def _quoted(self, source: Source, emit: Emit) -> Steps[None]:
        if (yield from source.until((self.quote,), emit)) is None:
            raise Malformed


GEMMA_4 = GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>")


def _next(source: Source, closer: str) -> Steps[str]:
    """Consumes a comma or `closer`, with white space around it."""
    yield from source.space()
    found = yield from source.expect(",", closer)
    if found == ",":
        yield from source.space()
    return found

"""Calls of Gemma 4 and FunctionGemma: `call:NAME{key:value,...}`, with strings between marks.

White space may stand around every part; the models write it in some calls, their template none.
"""

from dataclasses import dataclass

from model_zoo.chat.formats.calls import Calls, json_string
from model_zoo.chat.formats.pythonic import CONSTANTS
from model_zoo.chat.formats.scanner import (
    MAX_DEPTH,
    Emit,
    Malformed,
    Scanner,
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

    def read(self, scanner: Scanner, calls: Calls) -> Steps[None]:
        """A call after `open`. The models sometimes write `close` several times."""
        yield from scanner.space()
        yield from scanner.expect("call:")
        name = yield from scanner.while_in(lambda char: char not in "{<")
        calls.begin(name.strip())
        yield from self._object(scanner, calls.arguments, 0)
        calls.end()
        yield from scanner.space()
        while (yield from scanner.closing((self.close,))):
            yield from scanner.space()

    def _object(self, scanner: Scanner, emit: Emit, depth: int) -> Steps[None]:
        emit((yield from scanner.expect("{")))
        separator = ""
        yield from scanner.space()
        while not (yield from scanner.starts_with(("}",))):
            emit(f"{separator}{encoded((yield from self._key(scanner)))}: ")
            separator = ", "
            yield from scanner.space()
            yield from self._value(scanner, emit, depth)
            if (yield from _next(scanner, "}")) == "}":
                break
        emit("}")

    def _key(self, scanner: Scanner) -> Steps[str]:
        if (yield from scanner.starts_with((self.quote,))):
            pieces: list[str] = []
            yield from self._quoted(scanner, pieces.append)
            key = "".join(pieces)
        elif (yield from scanner.peek()) == '"':
            key = yield from json_string(scanner)
        else:
            key = (yield from scanner.while_in(lambda char: char not in ":{}[],<")).strip()
        yield from scanner.space()
        yield from scanner.expect(":")
        return key

    def _value(self, scanner: Scanner, emit: Emit, depth: int) -> Steps[None]:
        if (yield from scanner.starts_with((self.quote,))):
            emit('"')
            yield from self._quoted(scanner, lambda text: emit(encoded(text)[1:-1]))
            emit('"')
            return
        first = yield from scanner.peek()
        if first == '"':
            yield from scanner.json(emit)
            return
        if first in ("{", "["):
            if depth == MAX_DEPTH:
                raise Malformed
            yield from (self._object if first == "{" else self._list)(scanner, emit, depth + 1)
            return
        text = (yield from scanner.while_in(lambda char: char not in ",}]<")).strip()
        emit(encoded(decoded(CONSTANTS.get(text, text))))

    def _list(self, scanner: Scanner, emit: Emit, depth: int) -> Steps[None]:
        emit((yield from scanner.expect("[")))
        separator = ""
        yield from scanner.space()
        while not (yield from scanner.starts_with(("]",))):
            emit(separator)
            separator = ", "
            yield from self._value(scanner, emit, depth)
            if (yield from _next(scanner, "]")) == "]":
                break
        emit("]")

    def _quoted(self, scanner: Scanner, emit: Emit) -> Steps[None]:
        if (yield from scanner.until((self.quote,), emit)) is None:
            raise Malformed


GEMMA_4 = GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>")


def _next(scanner: Scanner, closer: str) -> Steps[str]:
    """Consumes a comma or `closer`, with white space around it."""
    yield from scanner.space()
    found = yield from scanner.expect(",", closer)
    if found == ",":
        yield from scanner.space()
    return found

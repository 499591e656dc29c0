"""Calls whose arguments are written one by one between markers, as in XML."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model_zoo.chat.formats import pythonic
from model_zoo.chat.formats.calls import Calls
from model_zoo.chat.formats.scanner import (
    PIECE,
    Emit,
    Extent,
    Malformed,
    Scanner,
    Steps,
    decoded,
    encoded,
)
from model_zoo.chat.formats.schema_place import Reading

CDATA, CDATA_END = "<![CDATA[", "]]>"
MAX_LITERAL = 1 << 18  # characters of a Python list or dict; each takes 2 microseconds
# Notations of JSON's constants that some models use.
_PYTHON = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class Parameters:
    """Markers of `BEGIN name NAME_END KEY key KEY_END VALUE value VALUE_END … END`, and `closer`
    after the last call. A marker may be empty: without `begin` there is one call.

    `padded`: a value has a line break at each end that is not part of it. Attributes may follow a
    name or a key after a quotation mark; those of a key say whether its value is text or JSON,
    otherwise the schema of the tool does.
    """

    name_end: str
    key: str
    key_end: str
    value_end: str
    end: str
    begin: str = ""
    value: str = ""
    closer: str = ""
    padded: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that the grammar needs to see."""
        names = (self.begin, self.name_end, self.end)
        found = (*names, self.key, self.key_end, self.value, self.value_end)
        return tuple(marker for marker in found if marker)

    def read(self, scanner: Scanner, calls: Calls) -> Steps[None]:
        """The calls between the opener and `closer`, which may be missing."""
        yield from scanner.space()
        if self.begin:
            yield from scanner.expect(self.begin)
        yield from self.read_begun(scanner, calls)

    def read_begun(self, scanner: Scanner, calls: Calls) -> Steps[None]:
        """The calls after the `begin` of the first one."""
        while True:
            yield from self._read_call(scanner, calls)
            yield from scanner.space()
            following = tuple(marker for marker in (self.closer, self.begin) if marker)
            if (yield from scanner.closing(following)) != (self.begin or None):
                return
            if not self.begin:
                return

    def _read_call(self, scanner: Scanner, calls: Calls) -> Steps[None]:
        name = yield from scanner.while_in(_in_name)
        if self.name_end:
            yield from scanner.until((self.name_end,), _ignore)
        calls.begin(name)
        separator = "{"
        while True:
            yield from scanner.space()
            if (yield from scanner.expect(self.key, self.end)) == self.end:
                break
            key, attributes = yield from self._read_key(scanner)
            calls.arguments(f"{separator}{encoded(key)}: ")
            reader = _reader(calls, name, key, attributes)
            yield from self._read_value(scanner, calls.arguments, reader)
            separator = ", "
        calls.arguments("{}" if separator == "{" else "}")
        calls.end()

    def _read_key(self, scanner: Scanner) -> Steps[tuple[str, str]]:
        pieces: list[str] = []
        if (yield from scanner.until((self.key_end,), pieces.append)) is None:
            raise Malformed
        quote = '"' if self.key_end.startswith('"') else ""
        key, _, attributes = ("".join(pieces) + quote).strip().partition('"')
        return key, attributes

    def _read_value(
        self, scanner: Scanner, emit: Emit, convert: Callable[[str], Any] | None
    ) -> Steps[None]:
        """A value that is converted as a whole, or a text (`convert` is None)."""
        if self.value:
            yield from scanner.space()
            yield from scanner.expect(self.value)
        value = _Value(emit, padded=self.padded, convert=convert)
        cdata = yield from scanner.starts_with((CDATA,))
        end = self.value_end if cdata is None else CDATA_END
        while True:
            if (yield from scanner.until((end,), value.add)) is None:
                raise Malformed
            if not value.ends_within_string():
                break
            value.add(end)
        if cdata is not None:
            yield from scanner.expect(self.value_end)
        value.finish()


class _Value:
    """The text of a value. If the value is a text (`convert` is None), it is emitted as a JSON
    string as it arrives."""

    def __init__(self, emit: Emit, *, padded: bool, convert: Callable[[str], Any] | None) -> None:
        self._emit = emit
        self._padded = padded
        self._convert = convert
        self._begun = False
        self._break = "\n"
        self._held = ""
        self._extent: Extent | None = None
        self._scanned = 0
        if convert is None:
            emit('"')

    def add(self, piece: str) -> None:
        self._held += piece
        if self._padded and not self._begun:
            if self._held in ("", "\r"):
                return
            self._break = "\r\n" if self._held.startswith("\r\n") else "\n"
            self._held = self._held.removeprefix(self._break)
            self._begun = True
        if self._convert is None:
            kept = self._unpadded()
            if self._break == "\r\n":
                kept = kept.removesuffix("\r")
            self._emit(encoded(kept)[1:-1])
            self._held = self._held[len(kept) :]

    def ends_within_string(self) -> bool:
        """Whether this is the beginning of a JSON value that ends within a string."""
        if self._convert is not _json or not self._held.lstrip().startswith(("{", "[", '"')):
            return False
        if self._extent is None:
            text = self._held.strip()
            if _literal(text) is not text:
                return False  # Python's notation, whose strings have other quotation marks
            self._extent = Extent()
            self._scanned = len(self._held) - len(self._held.lstrip())
        self._scanned += self._extent.advance(self._held[self._scanned :])
        return self._extent.in_string and not self._extent.broken

    def finish(self) -> None:
        if self._convert is None:
            self._emit('"')
        else:
            self._emit(encoded(self._convert(self._unpadded())))

    def _unpadded(self) -> str:
        """The held text without the line break that may end the value."""
        return self._held.removesuffix(self._break) if self._padded else self._held


def _reader(calls: Calls, tool: str, key: str, attributes: str) -> Callable[[str], Any] | None:
    """A function that converts the text of a value; None: the text is the value."""
    if attributes:
        return None if 'string="true"' in attributes else _json
    return reader_of(calls.reading(tool, key))


def _json(text: str) -> Any:
    """The value of a JSON text or of Python's notation of it; otherwise the text itself."""
    text = text.strip()
    if text in _PYTHON:
        return _PYTHON[text]
    try:
        return decoded(text)
    except Malformed:
        return _literal(text) if text.startswith(("[", "{")) else text


def _literal(text: str) -> Any:
    """The value of a Python literal; otherwise the text itself."""
    if len(text) > MAX_LITERAL:
        return text
    scanner, pieces = Scanner(), list[str]()
    steps = _only_literal(scanner, pieces.append)
    try:
        for at in range(0, len(text), PIECE):
            scanner.add(text[at : at + PIECE])
            next(steps, None)
        scanner.finish()
        next(steps, None)
        return decoded("".join(pieces))
    except Malformed:
        return text


def _only_literal(scanner: Scanner, emit: Emit) -> Steps[None]:
    yield from pythonic.value(scanner, emit)
    yield from scanner.space()
    if (yield from scanner.peek()):
        raise Malformed


def _text_or_null(text: str) -> str | None:
    return None if text.strip() in ("null", "None") else text


_READERS: Mapping[Reading, Callable[[str], Any] | None] = {
    Reading.TEXT: None,
    Reading.TEXT_OR_NULL: _text_or_null,
    Reading.JSON: _json,
}


def reader_of(reading: Reading) -> Callable[[str], Any] | None:
    """A function that converts the text of a value; None: the text is the value."""
    return _READERS[reading]


def _in_name(char: str) -> bool:
    return not char.isspace() and char not in "<>\"'{}[]|"


def _ignore(piece: str) -> None:
    """Ignores the attributes of a call."""

"""Incremental parsing of generated text: grammars are generators that yield when they need more
text.

Every read emits text as soon as it cannot be part of a marker, so a parser never holds text longer
than its grammar requires.
"""

import json
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from model_zoo.chat.formats.events import Event

PIECE = 1 << 10  # characters added at once; unconsumed text is copied at each step
MAX_DEPTH = 32  # nesting of lists and objects in arguments that are not JSON

Result = TypeVar("Result")
# A part of a grammar. It yields when it needs more text, and returns its result.
Steps = Generator[None, None, Result]
Emit = Callable[[str], None]


class Scanner:
    """Generated text that has been received but not yet consumed. `thinking`: whether the consumed
    text ends within thinking; only the grammar changes it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.thinking = False
        self._complete = False
        self._held = ""
        self._recorded: list[str] | None = None
        self._fence = ""
        self._fenced_off = ""  # received text at or after the fence, or its possible beginning
        self._fence_found = False

    @property
    def ended(self) -> bool:
        """Whether no text follows that which has been received, before the fence if there is
        one."""
        return self._complete or self._fence_found

    def add(self, text: str) -> None:
        if self._fence:
            self._fenced_off += text
            self._move_to_fence()
        else:
            self._held += text

    def finish(self) -> None:
        """There is no further text."""
        self._complete = True
        self._move_to_fence()

    def fence(self, marker: str) -> None:
        """From now on, the text ends before the first `marker`; if this is empty, it does not."""
        self._fenced_off, self._held = self._held + self._fenced_off, ""
        self._fence, self._fence_found = marker, False
        self._move_to_fence()

    def record(self, text: str = "") -> None:
        """Start recording: `recorded` returns `text` followed by all text consumed from now on."""
        self._recorded = [text]

    def recorded(self) -> str:
        assert self._recorded is not None
        return "".join(self._recorded)

    def take(self, count: int) -> str:
        """Consumes `count` characters, which must have been received."""
        taken, self._held = self._held[:count], self._held[count:]
        if self._recorded is not None:
            self._recorded.append(taken)
        return taken

    def until(
        self, markers: Sequence[str], emit: Emit, *, trim: bool = False
    ) -> Steps[tuple[str, str] | None]:
        """Consumes text up to and including the first of `markers`; passes the text before it to
        `emit`. Returns the white space that `trim` cut off the end of that text, and the marker;
        None if the text ended without a marker."""
        while True:
            marker = self._first(markers)
            if marker is not None:
                text = self.take(self._held.index(marker))
                kept = text.rstrip() if trim else text
                emit(kept)
                return text[len(kept) :], self.take(len(marker))
            keep = 0 if self.ended else self._uncertain(markers, trim=trim)
            emit(self.take(len(self._held) - keep))
            if self.ended:
                return None
            yield

    def expect(self, *options: str) -> Steps[str]:
        """Consumes one of the options; raises Malformed if the text starts with none of them."""
        found = yield from self.starts_with(options)
        if found is None:
            raise Malformed
        return found

    def starts_with(self, options: Sequence[str]) -> Steps[str | None]:
        """Consumes and returns the option that the text starts with; None if there is none."""
        while True:
            for option in options:
                if self._held.startswith(option):
                    return self.take(len(option))
            if self.ended or not any(option.startswith(self._held) for option in options):
                return None
            yield

    def closing(self, options: Sequence[str]) -> Steps[str | None]:
        """`starts_with` for markers after a call. If the reply ends within one, as `max_tokens` may
        cut it, its beginning is consumed too, because the call is complete without it."""
        found = yield from self.starts_with(options)
        if found is None and self._complete and any(o.startswith(self._held) for o in options):
            self.take(len(self._held))
        return found

    def space(self) -> Steps[None]:
        """Consumes white space."""
        while True:
            rest = self._held.lstrip()
            self.take(len(self._held) - len(rest))
            if rest or self.ended:
                return
            yield

    def peek(self) -> Steps[str]:
        """The next character, without consuming it; empty at the end."""
        while not self._held and not self.ended:
            yield
        return self._held[:1]

    def while_in(self, accepted: Callable[[str], bool]) -> Steps[str]:
        """Consumes and returns characters while `accepted` returns True."""
        text = ""
        while True:
            count = next(
                (at for at, char in enumerate(self._held) if not accepted(char)), len(self._held)
            )
            text += self.take(count)
            if self._held or self.ended:
                return text
            yield

    def json(self, emit: Emit) -> Steps[Any]:
        """Consumes one JSON object, array or string and passes its pieces to `emit`. Returns its
        value.

        Raises Malformed as soon as the text cannot be one.
        """
        first = yield from self.peek()
        if first not in ("{", "[", '"'):
            raise Malformed
        text, extent = "", Extent()
        while True:
            count = extent.advance(self._held)
            piece = self.take(count)
            text += piece
            if piece:
                emit(piece)
            if extent.complete:
                return decoded(text)
            if self.ended or extent.broken:
                raise Malformed
            yield

    def _move_to_fence(self) -> None:
        """Makes the received text before the fence readable."""
        if self._fence_found:
            return
        count = self._fenced_off.find(self._fence) if self._fence else -1
        self._fence_found = count >= 0
        if count < 0:
            certain = not self._fence or self._complete
            begun = 0 if certain else _begun_marker(self._fenced_off, (self._fence,))
            count = len(self._fenced_off) - begun
        self._held += self._fenced_off[:count]
        self._fenced_off = self._fenced_off[count:]

    def _first(self, markers: Sequence[str]) -> str | None:
        found = [(at, -len(m), m) for m in markers if (at := self._held.find(m)) >= 0]
        return min(found)[2] if found else None

    def _uncertain(self, markers: Sequence[str], *, trim: bool) -> int:
        """Length of the text's end that may be the beginning of a marker, or space before one."""
        held, longest = self._held, _begun_marker(self._held, markers)
        if trim:
            certain = held[: len(held) - longest]
            longest += len(certain) - len(certain.rstrip())
        return longest


def _begun_marker(text: str, markers: Sequence[str]) -> int:
    """Length of the longest incomplete beginning of a marker that the text ends with."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


class Malformed(Exception):
    """The text does not follow the grammar of a call."""


class Extent:
    """Finds the end of a JSON object, array or string that arrives in pieces."""

    def __init__(self) -> None:
        self.complete = False
        self.broken = False
        self._closers: list[str] = []
        self.in_string = False
        self._escaped = False

    def advance(self, text: str) -> int:
        """The number of characters of `text` that belong to the value."""
        for at, char in enumerate(text):
            self._step(char)
            if self.complete:
                return at + 1
            if self.broken:
                return at
        return len(text)

    def _step(self, char: str) -> None:
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self.in_string = False
                self.complete = not self._closers
            elif char < " ":
                self.broken = True  # control characters must be escaped
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self._closers.append("}" if char == "{" else "]")
        elif char in "}]":
            self.broken = not self._closers or self._closers.pop() != char
            self.complete = not self.broken and not self._closers


def decoded(text: str) -> Any:
    """The value of a JSON text. Malformed if it is invalid or cannot be written as JSON in
    UTF-8."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=finite)
        if "\\u" in text:
            encoded(value).encode()
    except (ValueError, RecursionError):
        raise Malformed from None
    return value


def encoded(value: Any) -> str:
    """The JSON text of a value, with letters as they are."""
    return json.dumps(value, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError


def finite(text: str) -> float:
    """The number nearest to a text; instead of infinity, which JSON cannot express, the largest
    number."""
    largest = sys.float_info.max
    return max(-largest, min(float(text), largest))

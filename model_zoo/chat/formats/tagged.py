"""Replies whose thinking and calls stand between marker texts, as most families write them."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from model_zoo.chat.formats import pythonic
from model_zoo.chat.formats.calls import Calls, Grammar, Tools, arguments_of, json_calls
from model_zoo.chat.formats.events import Text, Thinking
from model_zoo.chat.formats.scanner import Scanner, Steps


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """The texts before and after thinking, and texts that may enclose the answer after it."""

    open: str
    close: str
    answer_open: str = ""
    answer_close: str = ""

    @property
    def texts(self) -> frozenset[str]:
        found = (self.open, self.close, self.answer_open, self.answer_close)
        return frozenset(text for text in found if text)


@dataclass(frozen=True, slots=True)
class ThinkingEnd:
    """How to end thinking from outside. `text`: what the model would write to end it. `again`: what
    would start thinking again directly after it; empty if nothing would."""

    text: str
    again: str = ""


class BareCalls(Protocol):
    """Calls without a marker; they are recognised only at the beginning of a reply."""

    def opener(self, scanner: Scanner, tools: Tools) -> Steps[str | None]:
        """Consumes and returns the text that identifies a call; None if there is no call."""

    def read(self, scanner: Scanner, calls: Calls, opener: str) -> Steps[None]:
        """Reads the call after `opener`."""


@dataclass(frozen=True, slots=True)
class TaggedReply:
    """`openers` map the marker before calls to their grammar. `dropped`: markers without meaning.
    `calls_end_thinking`: calls before the closing tag, which some models omit, end the thinking."""

    thinking: ThinkingTags | None = None
    openers: Mapping[str, Grammar] = field(default_factory=dict)
    bare: BareCalls | None = None
    dropped: tuple[str, ...] = ()
    calls_end_thinking: bool = False

    def read(
        self, scanner: Scanner, tools: Tools, *, thinks: bool, continues: bool, formed: bool
    ) -> Steps[None]:
        """Reads a whole reply. `thinks`: the prompt ends within thinking; `continues`: within the
        text. Calls are text unless there are `tools`. `formed`: text has a required form, so it
        contains no markup.

        White space around thinking and calls is dropped, because templates add it again.
        """
        calls = Calls(scanner, tools)
        ends = {self.thinking.answer_close} - {""} if self.thinking else set()
        if continues:
            yield from self._read_text(scanner, calls, ends, (), formed=formed)
            return
        blank = "" if thinks else (yield from scanner.while_in(str.isspace))
        if not thinks and self.thinking:
            tags = (self.thinking.open, self.thinking.close)
            found = yield from scanner.starts_with(tags)
            thinks = found == self.thinking.open
            if found == self.thinking.close:  # some models begin so when they do not think
                blank = ""
                yield from scanner.space()
        elif self.thinking:  # some models open it again
            yield from scanner.space()
            yield from scanner.starts_with((self.thinking.open,))
        late = (yield from self._think(scanner, calls)) if thinks else ()
        enclosed = yield from self._opens_answer(scanner)
        blank = "" if thinks or enclosed else blank
        if tools and self.bare:
            blank = yield from _read_bare(scanner, calls, self.bare, blank)
        if formed:
            blank = yield from self._read_calls(scanner, calls, blank)
        _emit_text(scanner, blank)
        yield from self._read_text(scanner, calls, ends, late, formed=formed)

    def _read_calls(self, scanner: Scanner, calls: Calls, blank: str) -> Steps[str]:
        """Reads calls before text of a required form. Returns white space that belongs to the
        text."""
        openers = self.openers if calls.tools else {}
        while True:
            marker = yield from scanner.starts_with((*openers, *self.dropped))
            if marker is None:
                return blank
            if marker in openers and not (yield from calls.read(blank + marker, openers[marker])):
                return ""
            blank = ""
            yield from scanner.space()

    def _read_text(
        self, scanner: Scanner, calls: Calls, ends: Set[str], late: tuple[str, ...], *, formed: bool
    ) -> Steps[None]:
        """Reads the text. `ends`: markers that count as text unless they end the reply or precede
        calls. `late`: the closing tag of thinking that a call has ended, which may follow."""
        openers = self.openers if calls.tools and not formed else {}
        thinking = [self.thinking.open] if self.thinking and not formed else []
        dropped = () if formed else self.dropped
        ends = {*ends, *self.dropped} if formed else {*ends}
        held = ""

        def say(text: str) -> None:
            nonlocal held
            if held and (not text or text.isspace()):
                held += text
            else:
                _emit_text(scanner, held + text)
                held = ""

        while True:
            markers = (*openers, *thinking, *dropped, *ends, *late)
            found = yield from scanner.until(markers, say, trim=bool(markers))
            if found is None:
                return
            blank, marker = found
            if marker in ends:
                held += blank + marker
                continue
            if marker in openers:
                if (yield from calls.read(blank + marker, openers[marker])):
                    yield from scanner.space()
            elif marker in thinking or marker in late:
                late = (yield from self._think(scanner, calls)) if marker in thinking else ()
                yield from scanner.space()
                yield from self._opens_answer(scanner)
            held = ""

    def _think(self, scanner: Scanner, calls: Calls) -> Steps[tuple[str, ...]]:
        """Reads thinking up to its closing tag, or a call. Returns the tag if it may follow yet."""
        assert self.thinking is not None
        closer, late, scanner.thinking = self.thinking.close, False, True
        openers = self.openers if calls.tools and self.calls_end_thinking else {}
        yield from scanner.space()
        while not late:
            found = yield from scanner.until(
                (closer, *openers), lambda text: scanner.events.append(Thinking(text)), trim=True
            )
            if found is None or found[1] == closer:
                break
            blank, opener = found
            scanner.thinking = False
            late = yield from calls.read_in_thinking(blank + opener, openers[opener], closer)
            scanner.thinking = not late
        scanner.thinking = False
        yield from scanner.space()
        return (closer,) if late else ()

    def _opens_answer(self, scanner: Scanner) -> Steps[bool]:
        """Consumes the text that opens the answer, if it follows. Returns whether it does."""
        opener = self.thinking.answer_open if self.thinking else ""
        if not opener or (yield from scanner.starts_with((opener,))) is None:
            return False
        yield from scanner.space()
        return True


def _read_bare(scanner: Scanner, calls: Calls, bare: BareCalls, blank: str) -> Steps[str]:
    """Reads calls without a marker, separated by semicolons or white space. Returns the last
    separator, after which no call followed."""
    calls.declared_only = True
    while True:
        opener = yield from bare.opener(scanner, calls.tools)
        if opener is None:
            break
        grammar = partial(_bare_grammar, bare, opener)
        if not (yield from calls.read(blank + opener, grammar)):
            blank = ""
            break
        yield from scanner.space()
        blank = (yield from scanner.starts_with((";",))) or ""
        blank += yield from scanner.while_in(str.isspace)
    calls.declared_only = False
    return blank


def _bare_grammar(bare: BareCalls, opener: str, scanner: Scanner, calls: Calls) -> Steps[None]:
    yield from bare.read(scanner, calls, opener)


class BareJson:
    """JSON objects, or a list of them."""

    def opener(self, scanner: Scanner, tools: Tools) -> Steps[str | None]:
        return "" if (yield from scanner.peek()) in ("{", "[") else None

    def read(self, scanner: Scanner, calls: Calls, opener: str) -> Steps[None]:
        yield from json_calls(scanner, calls)


class BarePython:
    """A list of calls in Python's notation. It is text unless it begins with a tool's name."""

    def opener(self, scanner: Scanner, tools: Tools) -> Steps[str | None]:
        return (yield from scanner.starts_with([f"[{name}(" for name in tools]))

    def read(self, scanner: Scanner, calls: Calls, opener: str) -> Steps[None]:
        yield from pythonic.calls_after(scanner, calls, opener[1:-1])


class BareNames:
    """A line with a tool's name, then a JSON object: GLM-4's notation."""

    def opener(self, scanner: Scanner, tools: Tools) -> Steps[str | None]:
        return (yield from scanner.starts_with([f"{name}\n" for name in tools]))

    def read(self, scanner: Scanner, calls: Calls, opener: str) -> Steps[None]:
        yield from arguments_of(scanner, calls, opener.strip())


def _emit_text(scanner: Scanner, text: str) -> None:
    scanner.events.append(Text(text))

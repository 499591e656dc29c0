"""Tool calls in generated text: JSON objects and lists, names before JSON, XML-like parameters.

A grammar consumes one call, or a list of calls, and reports it to `Calls`. It raises Malformed if
the text does not follow it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from model_zoo.chat.formats.events import (
    CallAborted,
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    Text,
    Thinking,
)
from model_zoo.chat.formats.scanner import Malformed, Scanner, Steps, decoded, encoded
from model_zoo.chat.formats.schema_place import Place, Reading

NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")
IDS = ("id", "tool_call_id")
_KEYS = (*NAMES, *ARGUMENTS, *IDS, "function", "type")

# The JSON schema of a tool's parameters, by the tool's name.
Tools = Mapping[str, Mapping[str, Any]]


class Calls:
    """Collects the calls of one reply. `tools`: those that the request declares.

    With `declared_only`, calls of other tools are malformed: where no marker precedes a call, only
    its name distinguishes it from other JSON. `ignored`: names whose calls are not reported, unless
    the request declares them.
    """

    def __init__(self, scanner: Scanner, tools: Tools) -> None:
        self.tools = tools
        self.declared_only = False
        self.ignored: frozenset[str] = frozenset()
        self._scanner = scanner
        self._count = 0
        self._open = False
        self._ignoring = False
        self._withheld: list[Event] | None = None
        self._readings: dict[tuple[str, str], Reading] = {}

    def begin(self, name: object, identity: object = None) -> None:
        if self._open:
            raise Malformed
        checked = self.checked_name(name)
        self._open = True
        self._ignoring = checked in self.ignored and checked not in self.tools
        known = identity if isinstance(identity, str) and identity else None
        self._add(CallBegin(self._count, checked, known))

    def checked_name(self, name: object) -> str:
        """The name of a call. Raises Malformed for other values."""
        if not isinstance(name, str) or not name:
            raise Malformed
        if self.declared_only and name not in self.tools:
            raise Malformed
        return name

    def reading(self, tool: str, parameter: str) -> Reading:
        """How the text of a parameter is read, by the schema of the tool."""
        known = self._readings.get((tool, parameter))
        if known is None:
            known = Place.whole(self.tools.get(tool, {})).member(parameter).reading()
            self._readings[tool, parameter] = known
        return known

    def arguments(self, piece: str) -> None:
        self._add(CallArguments(self._count, piece))

    def end(self) -> None:
        if self._withheld is not None:
            self._scanner.events += self._withheld
            self._leave_thinking()
        self._add(CallEnd(self._count))
        self._close()
        self._scanner.record()  # text that follows is not part of this call, even if malformed

    def read(self, opener: str, grammar: "Grammar") -> Steps[bool]:
        """Reads calls by `grammar`, after `opener`. Malformed calls become text; returns False."""
        self._scanner.record(opener)
        try:
            yield from grammar(self._scanner, self)
        except Malformed:
            text = self._scanner.recorded()
            if self._withheld is not None:
                self._scanner.events.append(Thinking(text))
                self._open = False
            elif self._open and not self._ignoring:
                self._scanner.events.append(CallAborted(self._count, text))
                self._close()
            else:
                self._scanner.events.append(Text(text))
                self._open = False
            return False
        return True

    def read_in_thinking(self, opener: str, grammar: "Grammar", closer: str) -> Steps[bool]:
        """Like `read`, within thinking that `closer` ends. Returns whether there was a call.

        The first call is reported when it is complete, because malformed ones are thinking.
        """
        before, self._withheld = self._count, []
        self._scanner.fence(closer)
        yield from self.read(opener, grammar)
        self._leave_thinking()
        return self._count > before

    def _leave_thinking(self) -> None:
        self._withheld = None
        self._scanner.fence("")

    def _add(self, event: Event) -> None:
        if not self._ignoring:
            (self._scanner.events if self._withheld is None else self._withheld).append(event)

    def _close(self) -> None:
        assert self._open
        self._open = False
        if not self._ignoring:
            self._count += 1


Grammar = Callable[[Scanner, Calls], Steps[None]]


def json_object(scanner: Scanner, calls: Calls) -> Steps[None]:
    """`{"name": ..., "arguments": {...}}`, also within `{"type": "function", "function": ...}`.

    The arguments are passed on as they arrive if the name precedes them.
    """
    found: dict[str, Any] = {}
    yield from _members(scanner, calls, found, nested=False)
    if "ended" not in found:
        arguments = found.get("arguments", {})
        if isinstance(arguments, str):
            arguments = decoded(arguments)
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise Malformed
        calls.begin(found.get("name"), found.get("id"))
        calls.arguments(encoded(arguments))
    calls.end()


def _members(scanner: Scanner, calls: Calls, found: dict[str, Any], *, nested: bool) -> Steps[None]:
    yield from scanner.expect("{")
    yield from scanner.space()
    if (yield from scanner.starts_with(("}",))):
        return
    while True:
        key = yield from json_string(scanner)
        if calls.declared_only and key not in _KEYS:
            raise Malformed
        yield from scanner.space()
        yield from scanner.expect(":")
        yield from scanner.space()
        first = yield from scanner.peek()
        if key in ARGUMENTS and "name" in found and first == "{":
            calls.begin(found["name"], found.get("id"))
            yield from scanner.json(calls.arguments)
            found["ended"] = True
        elif key == "function" and first == "{" and not nested:
            yield from _members(scanner, calls, found, nested=True)
        else:
            value = yield from _value(scanner)
            if key in ARGUMENTS:
                found["arguments"] = value
            elif key in NAMES or (key == "function" and not nested):
                found["name"] = calls.checked_name(value)
            elif key in IDS:
                found["id"] = value
        yield from scanner.space()
        if (yield from scanner.expect(",", "}")) == "}":
            return
        yield from scanner.space()


def json_list(scanner: Scanner, calls: Calls) -> Steps[None]:
    """`[{"name": ..., "arguments": {...}}, ...]`, with at least one call."""
    yield from scanner.expect("[")
    yield from scanner.space()
    while True:
        yield from json_object(scanner, calls)
        yield from scanner.space()
        if (yield from scanner.expect(",", "]")) == "]":
            return
        yield from scanner.space()


def json_calls(scanner: Scanner, calls: Calls) -> Steps[None]:
    """A JSON object or a list of them."""
    yield from scanner.space()
    first = yield from scanner.peek()
    yield from (json_list if first == "[" else json_object)(scanner, calls)


def json_sequence(scanner: Scanner, calls: Calls) -> Steps[None]:
    """A list of JSON objects, or one or more objects separated by white space."""
    yield from json_calls(scanner, calls)
    yield from scanner.space()
    while (yield from scanner.peek()) == "{":
        yield from json_object(scanner, calls)
        yield from scanner.space()


def json_by_name(scanner: Scanner, calls: Calls) -> Steps[None]:
    """`[{NAME: {…}}, …]`, with at least one call."""
    yield from scanner.expect("[")
    yield from scanner.space()
    while True:
        yield from scanner.expect("{")
        yield from scanner.space()
        name = yield from json_string(scanner)
        yield from scanner.space()
        yield from scanner.expect(":")
        yield from arguments_of(scanner, calls, name)
        yield from scanner.space()
        yield from scanner.expect("}")
        yield from scanner.space()
        if (yield from scanner.expect(",", "]")) == "]":
            return
        yield from scanner.space()


def arguments_of(
    scanner: Scanner, calls: Calls, name: str, identity: str | None = None
) -> Steps[None]:
    """The JSON object of a call whose name is known."""
    yield from scanner.space()
    if (yield from scanner.peek()) != "{":
        raise Malformed
    calls.begin(name, identity)
    yield from scanner.json(calls.arguments)
    calls.end()


def closed_by(closer: str, grammar: Grammar) -> Grammar:
    """`grammar`, followed by an optional `closer` with white space around it."""

    def closed(scanner: Scanner, calls: Calls) -> Steps[None]:
        yield from scanner.space()
        yield from grammar(scanner, calls)
        yield from scanner.space()
        yield from scanner.closing((closer,))

    return closed


def json_string(scanner: Scanner) -> Steps[str]:
    """A JSON string as a whole."""
    if (yield from scanner.peek()) != '"':
        raise Malformed
    text: str = yield from scanner.json(_ignore)
    return text


def _value(scanner: Scanner) -> Steps[Any]:
    if (yield from scanner.peek()) in ("{", "[", '"'):
        return (yield from scanner.json(_ignore))
    return decoded((yield from scanner.while_in(_in_scalar)))


def _in_scalar(char: str) -> bool:
    return char.isalnum() or char in "+-."


def _ignore(piece: str) -> None:
    """Ignores a piece of a value that is used as a whole."""

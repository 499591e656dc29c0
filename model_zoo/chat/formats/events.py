"""The parts of a reply: text, thinking, and tool calls, in the order of the model's output."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the reply's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """A piece of the reasoning that precedes the text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call. `index` counts the calls of a reply from 0; `id` is None unless the model wrote
    one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of call `index`, as JSON text."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Call `index` is complete: the pieces of its arguments form a JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class CallAborted:
    """Call `index` is malformed. `text`: the whole call as the model wrote it.

    A reply that has not sent the call yet drops it and sends `text` instead.
    """

    index: int
    text: str


Event = Text | Thinking | CallBegin | CallArguments | CallEnd | CallAborted

"""Separates the text of a reply into text, thinking and tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass, field
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
from model_zoo.chat.formats.reply_parser import ReplyParser
from model_zoo.chat.formats.scanner import decoded
from serve_app.api.tools import new_call_id
from serve_app.messages.tasks import ChatDelta


class ReplyReader:
    """Parses the deltas of one reply. `tools`: those that the request declares.

    The first delta states the format. A replica that continues the reply states it again, and the
    parser continues: it has seen the same text.
    """

    def __init__(self, tools: Sequence[dict[str, Any]] = ()) -> None:
        self._tools = tools
        self._parser: ReplyParser | None = None

    def read(self, delta: ChatDelta) -> list[Event]:
        """The events that the text so far determines; all remaining ones if the delta ends the
        reply."""
        if delta.opening is not None and self._parser is None:
            self._parser = delta.opening.parser(self._tools)
        if self._parser is None:
            return [Text(delta.text)] if delta.text else []
        events = self._parser.feed(delta.text)
        return events if delta.finish is None else events + self._parser.finish()


@dataclass(slots=True)
class Call:
    """A tool call; `arguments` is JSON text."""

    name: str
    id: str
    arguments: str = ""

    def value(self) -> dict[str, Any]:
        """The arguments, whose numbers are finite."""
        found: dict[str, Any] = decoded(self.arguments or "{}")
        return found


@dataclass(slots=True)
class Collected:
    """The parts of a reply that have been read so far. Incomplete calls count as text."""

    text: str = ""
    thinking: str = ""
    calls: dict[int, Call] = field(default_factory=dict)

    def add(self, event: Event) -> Call | None:
        """Returns the call that `event` completes."""
        match event:
            case Text(text):
                self.text += text
            case Thinking(text):
                self.thinking += text
            case CallBegin(index, name, identity):
                self.calls[index] = Call(name, identity or new_call_id())
            case CallArguments(index, piece):
                self.calls[index].arguments += piece
            case CallAborted(index, text):
                del self.calls[index]
                self.text += text
            case CallEnd(index):
                return self.calls[index]
        return None

"""Parses replies for tests, whole or in pieces."""

import json
from dataclasses import dataclass
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
from model_zoo.chat.formats.reply_format import ReplyFormat

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {}},
}
TOOLS = {"get_weather": SCHEMA, "get_time": SCHEMA}
PARIS = {"city": 'Paris "{}" <é>', "days": 3}


@dataclass(frozen=True)
class Parsed:
    """A reply. `calls`: name, arguments and id of each that was completed."""

    text: str = ""
    thinking: str = ""
    calls: tuple[tuple[str, Any, str | None], ...] = ()


def parsed(events: list[Event]) -> Parsed:
    text, thinking, calls = "", "", []
    begun: dict[int, CallBegin] = {}
    arguments: dict[int, str] = {}
    for event in events:
        match event:
            case Text():
                text += event.text
            case Thinking():
                thinking += event.text
            case CallBegin():
                assert event.index == len(begun), "calls are counted from 0"
                begun[event.index], arguments[event.index] = event, ""
            case CallArguments():
                arguments[event.index] += event.json
            case CallEnd():
                call = begun[event.index]
                calls.append((call.name, json.loads(arguments[event.index]), call.id))
            case CallAborted():
                text += event.text
    return Parsed(text, thinking, tuple(calls))


def replied(
    form: ReplyFormat, pieces: list[str], *, tools=TOOLS, thinks=False, continues=False
) -> list[Event]:
    parser = form.parser(tools, thinks=thinks, continues=continues)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()

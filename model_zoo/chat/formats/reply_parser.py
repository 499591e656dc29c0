"""Parsing a reply while it is generated."""

from collections.abc import Callable
from itertools import groupby

from model_zoo.chat.formats.events import CallArguments, Event, Text, Thinking
from model_zoo.chat.formats.scanner import PIECE, Scanner, Steps

Grammar = Callable[[Scanner], Steps[None]]


class ReplyParser:
    """Splits the text of one reply into events by a grammar. `thinks`: whether the reply begins
    within thinking."""

    def __init__(self, grammar: Grammar, *, thinks: bool = False) -> None:
        self._scanner = Scanner()
        self._scanner.thinking = thinks
        self._steps = grammar(self._scanner)

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within thinking. A tag counts when it is complete."""
        return self._scanner.thinking

    def feed(self, text: str) -> list[Event]:
        """Add `text`; returns the events that are certain now."""
        for at in range(0, len(text), PIECE):
            self._scanner.add(text[at : at + PIECE])
            next(self._steps, None)
        return self._events()

    def finish(self) -> list[Event]:
        """The remaining events; the reply has ended."""
        self._scanner.finish()
        next(self._steps, None)
        return self._events()

    def _events(self) -> list[Event]:
        events, self._scanner.events = self._scanner.events, []
        return merged(events)


def merged(events: list[Event]) -> list[Event]:
    """The events without empty pieces, adjacent pieces of one kind joined."""
    result: list[Event] = []
    for (kind, index), group in groupby(events, key=_kind):
        pieces = list(group)
        if kind is Text or kind is Thinking:
            text = "".join(piece.text for piece in pieces)  # type: ignore[union-attr]
            result += [kind(text)] if text else []
        elif kind is CallArguments:
            text = "".join(piece.json for piece in pieces)  # type: ignore[union-attr]
            result += [CallArguments(index, text)] if text else []
        else:
            result += pieces
    return result


def _kind(event: Event) -> tuple[type[Event], int]:
    return type(event), getattr(event, "index", 0)

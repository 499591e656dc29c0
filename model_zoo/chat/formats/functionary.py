"""Functionary 3.2's replies: messages to everyone, which are text, or to tools."""

from functools import partial

from model_zoo.chat.formats.calls import Calls, Tools, arguments_of
from model_zoo.chat.formats.events import Text
from model_zoo.chat.formats.scanner import Scanner, Steps

NEXT, EVERYONE = ">>>", "all\n"


def read_functionary(scanner: Scanner, tools: Tools, *, continues: bool) -> Steps[None]:
    """Reads a whole reply: `>>>` and a line with `all` or a tool's name precede each message. The
    prompt ends with the first `>>>` or, if it `continues` a message, within the text of one."""
    calls = Calls(scanner, tools)
    before = ""
    if continues:
        if (yield from scanner.until((NEXT,), lambda text: _emit_text(scanner, text))) is None:
            return
        before = NEXT
    while True:
        recipient = yield from scanner.starts_with([EVERYONE, *(f"{name}\n" for name in tools)])
        if recipient is None:
            _emit_text(scanner, before)
        elif recipient != EVERYONE:
            grammar = partial(_named_arguments, recipient.strip())
            if (yield from calls.read(before + recipient, grammar)):
                yield from scanner.space()
        if (yield from scanner.until((NEXT,), lambda text: _emit_text(scanner, text))) is None:
            return
        before = NEXT


def _named_arguments(name: str, scanner: Scanner, calls: Calls) -> Steps[None]:
    yield from arguments_of(scanner, calls, name)


def _emit_text(scanner: Scanner, text: str) -> None:
    scanner.events.append(Text(text))

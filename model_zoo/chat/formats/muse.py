"""Muse Glimmer's replies: messages to recipients.

A message to `self` is thinking, one to `user` or without a recipient is text; others have calls.
"""

import re

from model_zoo.chat.formats.calls import Calls, Tools
from model_zoo.chat.formats.events import Text, Thinking
from model_zoo.chat.formats.family_parameters import MUSE
from model_zoo.chat.formats.scanner import Scanner, Steps

START, MESSAGE, NEXT, END = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
CALLS = "<atem:function_calls>"
MARKERS = (START, MESSAGE, NEXT, END, CALLS, *MUSE.markers)
# Ends a message and begins another one, whose recipient follows.
NEXT_ONE = f"{NEXT}{START}assistant"
TO_SELF, TO_USER = " to=self", " to=user"

_RECIPIENT = re.compile(r"to=([^\s<]+)")


def read_muse(scanner: Scanner, tools: Tools, *, continues: bool) -> Steps[None]:
    """Reads a whole reply; the prompt ends with `<|start|>assistant` or, if it `continues` a
    message, within the text of one."""
    calls = Calls(scanner, tools)
    if continues:
        yield from scanner.until((NEXT, END), lambda text: scanner.events.append(Text(text)))
    while (yield from scanner.peek()):
        header: list[str] = []
        if (yield from scanner.until((MESSAGE,), header.append)) is None:
            scanner.events.append(Text("".join(header)))
            return
        yield from _read_body(scanner, calls, "".join(header))


def _read_body(scanner: Scanner, calls: Calls, header: str) -> Steps[None]:
    found = _RECIPIENT.search(header)
    recipient = "user" if found is None else found[1]
    scanner.thinking = recipient == "self"
    kind = Thinking if scanner.thinking else Text
    # A tool may have the name of another recipient.
    if recipient in calls.tools or (calls.tools and recipient not in ("self", "user")):
        blank = yield from scanner.while_in(str.isspace)
        opener = yield from scanner.starts_with((CALLS,))
        if opener is None:
            scanner.events.append(kind(blank))
        elif (yield from calls.read(blank + opener, MUSE.read)):
            yield from scanner.space()
    yield from scanner.until((NEXT, END), lambda text: scanner.events.append(kind(text)))
    scanner.thinking = False

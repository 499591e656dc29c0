"""gpt-oss replies: messages with channel, recipient and content (OpenAI's harmony format).

Analysis is thinking; a message to `functions.NAME`, or to the name of a declared tool, is a call;
everything else is text.
"""

import re
from functools import partial

from model_zoo.chat.formats.calls import Calls, Tools, arguments_of
from model_zoo.chat.formats.events import Text, Thinking
from model_zoo.chat.formats.scanner import Scanner, Steps

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKERS = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
THINKING = "analysis"  # the channel
# Ends a message of thinking and begins another one, whose channel or recipient follows.
THINKING_END = f"{ENDS[0]}{START}assistant{CHANNEL}"

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(functions\.)?([^\s<]+)")


def read_harmony(scanner: Scanner, tools: Tools, *, continues: bool) -> Steps[None]:
    """Reads a whole reply; the prompt ends with `<|start|>assistant` or, if it `continues` a
    message, within the text of one."""
    calls = Calls(scanner, tools)
    if continues:
        yield from scanner.until((*ENDS, START), lambda text: scanner.events.append(Text(text)))
    while (yield from scanner.peek()):
        header: list[str] = []
        if (yield from scanner.until((MESSAGE,), header.append)) is None:
            scanner.events.append(Text(_without_markers("".join(header))))
            return
        yield from _read_body(scanner, calls, "".join(header))


def _read_body(scanner: Scanner, calls: Calls, header: str) -> Steps[None]:
    recipient = _RECIPIENT.search(header)
    channel = _CHANNEL.search(header)
    if recipient is not None and calls.tools and (recipient[1] or recipient[2] in calls.tools):
        name = recipient[2]
        blank = yield from scanner.while_in(str.isspace)
        if (yield from _ends(scanner)):  # a tool without parameters
            calls.begin(name)
            calls.arguments("{}")
            calls.end()
            return
        if (yield from calls.read(blank, partial(arguments_of, name=name))):
            yield from scanner.space()
    scanner.thinking = channel is not None and channel[1] == THINKING
    kind = Thinking if scanner.thinking else Text
    yield from scanner.until((*ENDS, START), lambda text: scanner.events.append(kind(text)))
    scanner.thinking = False


def _ends(scanner: Scanner) -> Steps[bool]:
    """Whether the message ends here. Consumes the marker of its end."""
    marker = yield from scanner.starts_with((*ENDS, START))
    return marker is not None or not (yield from scanner.peek())


def _without_markers(text: str) -> str:
    """The text without markers, for a reply that does not have the form of messages."""
    for marker in MARKERS:
        text = text.replace(marker, "")
    return text

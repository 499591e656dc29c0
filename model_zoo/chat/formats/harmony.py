"""gpt-oss replies: messages with channel, recipient and content (OpenAI's harmony format).

Analysis is thinking; a message to `functions.NAME`, or to the name of a declared tool, is a call;
everything else is text.
"""

import re

from model_zoo.chat.formats.calls import Calls, Tools, arguments_of
from model_zoo.chat.formats.events import Text, Thinking
from model_zoo.chat.formats.source import Source, Steps

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKERS = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(functions\.)?([^\s<]+)")


def read_harmony(source: Source, tools: Tools, *, continues: bool) -> Steps[None]:
    """Reads a whole reply; the prompt ends with `<|start|>assistant` or, if it `continues` a
    message, within the text of one."""
    calls = Calls(source, tools)
    if continues:
        yield from source.until((*ENDS, START), lambda text: source.events.append(Text(text)))
    while (yield from source.peek()):
        header: list[str] = []
        if (yield from source.until((MESSAGE,), header.append)) is None:
            source.events.append(Text(_without_markers("".join(header))))
            return
        yield from _read_body(source, calls, "".join(header))


def _read_body(source: Source, calls: Calls, header: str) -> Steps[None]:
    recipient = _RECIPIENT.search(header)
    channel = _CHANNEL.search(header)
    if recipient is not None and calls.tools and (recipient[1] or recipient[2] in calls.tools):
        name = recipient[2]
        blank = yield from source.while_in(str.isspace)
        if (yield from _ends(source)):  # a tool without parameters
            calls.begin(name)
            calls.arguments("{}")
            calls.end()
            return
        if (yield from calls.read(blank, lambda source, calls: arguments_of(source, calls, name))):
            yield from source.space()
    kind = Thinking if channel is not None and channel[1] == "analysis" else Text
    yield from source.until((*ENDS, START), lambda text: source.events.append(kind(text)))


def _ends(source: Source) -> Steps[bool]:
    """Whether the message ends here. Consumes the marker of its end."""
    marker = yield from source.starts_with((*ENDS, START))
    return marker is not None or not (yield from source.peek())


def _without_markers(text: str) -> str:
    """The text without markers, for a reply that does not have the form of messages."""
    for marker in MARKERS:
        text = text.replace(marker, "")
    return text

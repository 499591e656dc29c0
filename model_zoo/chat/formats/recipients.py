"""Replies of messages whose recipient determines their kind: Functionary 3.2 and Muse."""

from functools import partial

from model_zoo.chat.formats.calls import Calls, Tools, arguments_of
from model_zoo.chat.formats.events import Text, Thinking
from model_zoo.chat.formats.family_parameters import MUSE
from model_zoo.chat.formats.harmony import without_markers
from model_zoo.chat.formats.source import Source, Steps

NEXT, EVERYONE = ">>>", "all\n"
START, MESSAGE, MUSE_ENDS = "<|start|>", "<|message|>", ("<|eom|>", "<|eot|>")
MUSE_CALLS = "<atem:function_calls>"
MUSE_MARKERS = (START, MESSAGE, *MUSE_ENDS)


def read_functionary(source: Source, tools: Tools, *, continues: bool) -> Steps[None]:
    """Reads a whole reply: `>>>` and a line with `all` or a tool's name precede each message. The
    prompt ends with the first `>>>` or, if it `continues` a message, within the text of one."""
    calls = Calls(source, tools)
    before = ""
    if continues:
        if (yield from source.until((NEXT,), lambda text: _emit_text(source, text))) is None:
            return
        before = NEXT
    while True:
        recipient = yield from source.starts_with([EVERYONE, *(f"{name}\n" for name in tools)])
        if recipient is None:
            _emit_text(source, before)
        elif recipient != EVERYONE:
            grammar = partial(_named_arguments, recipient.strip())
            if (yield from calls.read(before + recipient, grammar)):
                yield from source.space()
        if (yield from source.until((NEXT,), lambda text: _emit_text(source, text))) is None:
            return
        before = NEXT


def read_muse(source: Source, tools: Tools, *, continues: bool) -> Steps[None]:
    """Reads a whole reply of messages to the model itself, to the user or to tools; the prompt ends
    with `<|start|>assistant` or, if it `continues` a message, within the text of one."""
    calls = Calls(source, tools)
    ends = (*MUSE_ENDS, START)
    if continues:
        yield from source.until(ends, partial(_emit_text, source))
    while (yield from source.peek()):
        header: list[str] = []
        if (yield from source.until((MESSAGE,), header.append)) is None:
            _emit_text(source, without_markers("".join(header), MUSE_MARKERS))
            return
        thinking = "to=self" in "".join(header)
        if not thinking and tools and (yield from source.starts_with((MUSE_CALLS,))):
            yield from calls.read(MUSE_CALLS, MUSE.read)
        say = partial(_think if thinking else _emit_text, source)
        yield from source.until(ends, say)


def _named_arguments(name: str, source: Source, calls: Calls) -> Steps[None]:
    yield from arguments_of(source, calls, name)


def _emit_text(source: Source, text: str) -> None:
    source.events.append(Text(text))


def _think(source: Source, text: str) -> None:
    source.events.append(Thinking(text))

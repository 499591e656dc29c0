"""Compiles and renders a model file's Jinja template as `transformers` does, in other processes."""

import json
import marshal
from collections.abc import Mapping
from datetime import datetime
from queue import LifoQueue
from typing import Any

from model_zoo.chat.sandbox.frames import Outcome, RenderLimits, RenderReply
from model_zoo.chat.sandbox.renderer import Renderer
from runtime.errors import ModelFileError, RequestError, TemplateLimitError

MAX_SOURCE_CHARACTERS = 1 << 17
# Several renderers, so that a long rendering does not delay other conversations with the template.
PROCESSES = 2
# Each limit has a constant part and a part per byte of the request. Published templates use a
# quarter of it at most, with 2,000 tools, 500 parallel calls or a thousand turns.
_SECONDS, _SECONDS_PER_BYTE, _MOST_SECONDS = 0.25, 3e-6, 30.0
# Published templates loop over all earlier messages for each message.
_SECONDS_PER_PAIR = 5e-5
_MEMORY_BYTES, _MEMORY_PER_BYTE = 64 << 20, 64
_TEXT_BYTES, _TEXT_PER_BYTE = 1 << 18, 16
_COMPILING_SECONDS, _COMPILING_SECONDS_PER_CHARACTER = 1.0, 4e-5
_COMPILING_MEMORY_BYTES, _COMPILING_MEMORY_PER_CHARACTER = 32 << 20, 1 << 10


class Template:
    """A compiled template. Raises ModelFileError if the source cannot be compiled.

    `most`: upper limits of a rendering, whose limits otherwise grow with the conversation.
    `inspected`: constant texts that it compares values with or passes to a string method. `names`:
    the variables, attributes and constant texts that it reads. `variables`: the variables that it
    reads and never sets.
    """

    def __init__(self, source: str, *, most: RenderLimits | None = None) -> None:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise ModelFileError(
                f"The file's chat template has {len(source):,} characters; "
                f"{MAX_SOURCE_CHARACTERS:,} is the limit."
            )
        limits = _compiling_limits(source)
        first, *further = [Renderer(source, limits) for _ in range(PROCESSES)]
        found = _compiled(first.start(), limits)
        self._most = most
        self.inspected = frozenset(found["inspected"])
        self.names = frozenset(found["names"])
        self.variables = frozenset(found["variables"])
        # Last in, first out, so that another process starts only when all others are busy.
        self._idle: LifoQueue[Renderer] = LifoQueue()
        for renderer in (*further, first):
            self._idle.put(renderer)

    def render(
        self,
        variables: Mapping[str, Any],
        *,
        now: datetime | None = None,
        most: RenderLimits | None = None,
    ) -> str:
        """The rendered text; RequestError if the template refuses or fails, TemplateLimitError if
        it exceeds a limit.

        `variables`: JSON values (dicts, lists, strings, numbers, booleans, None). `now`: the time
        that the template sees, by default the local time. `most`: upper limits beside the
        template's own. Thread-safe.
        """
        # Version 2 of marshal repeats equal strings, so that the size is a measure of the work.
        body = marshal.dumps((dict(variables), now.isoformat() if now else None), 2)
        limits = _limits(variables, len(body))
        for bounds in filter(None, (self._most, most)):
            limits = limits.within(bounds)
        renderer = self._idle.get()
        try:
            reply = renderer.render(body, limits)
        finally:
            self._idle.put(renderer)
        return _rendered(reply, limits)


def _limits(variables: Mapping[str, Any], size: int) -> RenderLimits:
    pairs = len(variables.get("messages", ())) ** 2
    seconds = _SECONDS + _SECONDS_PER_BYTE * size + _SECONDS_PER_PAIR * pairs
    return RenderLimits(
        min(seconds, _MOST_SECONDS),
        _MEMORY_BYTES + _MEMORY_PER_BYTE * size,
        _TEXT_BYTES + _TEXT_PER_BYTE * size,
    )


def _compiling_limits(source: str) -> RenderLimits:
    return RenderLimits(
        _COMPILING_SECONDS + _COMPILING_SECONDS_PER_CHARACTER * len(source),
        _COMPILING_MEMORY_BYTES + _COMPILING_MEMORY_PER_CHARACTER * len(source),
        _TEXT_BYTES + _TEXT_PER_BYTE * len(source),
    )


def _compiled(reply: RenderReply | None, limits: RenderLimits) -> dict[str, list[str]]:
    match reply:
        case RenderReply(Outcome.DONE, found):
            return json.loads(found)
        case RenderReply(Outcome.REFUSED, reason):
            raise ModelFileError(f"The file's chat template is broken: {reason}")
        case RenderReply(Outcome.FAILED | Outcome.FORBIDDEN, reason):
            raise ModelFileError(f"The file's chat template cannot be compiled: {reason}.")
    raise ModelFileError(
        f"The file's chat template cannot be compiled in {limits.seconds:.1f} s of processor time "
        f"and {limits.memory_bytes >> 20:,} MiB of memory; shorten it."
    )


def _rendered(reply: RenderReply | None, limits: RenderLimits) -> str:
    match reply:
        case RenderReply(Outcome.DONE, text):
            return text
        case RenderReply(Outcome.REFUSED, reason):
            raise RequestError(f"The chat template refuses the conversation: {reason}")
        case RenderReply(Outcome.FORBIDDEN, reason):
            raise RequestError(f"The chat template is not allowed what it does: {reason}.")
        case RenderReply(Outcome.FAILED, reason):
            raise RequestError(f"The chat template fails on the conversation: {reason}")
        case RenderReply(Outcome.TOO_MUCH_MEMORY):
            limit = f"{limits.memory_bytes >> 20:,} MiB of memory"
        case RenderReply(Outcome.TOO_MUCH_TEXT):
            limit = f"{limits.reply_bytes:,} bytes of text"
        case _:
            limit = f"{limits.seconds:.2f} s of processor time, or crashes"
    raise TemplateLimitError(f"For this conversation the chat template needs more than {limit}.")

"""Running a model file's Jinja template as `transformers` does, in processes of its own."""

import json
import marshal
from collections.abc import Mapping
from datetime import datetime
from queue import LifoQueue
from typing import Any

from model_zoo.chat.sandbox.frames import Limits, Outcome, Reply
from model_zoo.chat.sandbox.renderer import Renderer
from runtime.errors import ModelFileError, RequestError

MAX_SOURCE_CHARACTERS = 1 << 17
# A long rendering must not keep a template's other conversations waiting.
PROCESSES = 2
# Each limit has a part for any request and one for each byte that is sent along: time and memory
# grow with what was asked, not with what a template wants. Published templates take a quarter of
# it at most, with 2,000 tools, 500 parallel calls or a thousand turns.
_SECONDS, _SECONDS_PER_BYTE, _MOST_SECONDS = 0.25, 3e-6, 30.0
# Published templates look back over all earlier messages at each.
_SECONDS_PER_PAIR = 5e-5
_MEMORY_BYTES, _MEMORY_PER_BYTE = 64 << 20, 64
_TEXT_BYTES, _TEXT_PER_BYTE = 1 << 18, 16
_COMPILING_SECONDS, _COMPILING_SECONDS_PER_CHARACTER = 1.0, 4e-5
_COMPILING_MEMORY_BYTES, _COMPILING_MEMORY_PER_CHARACTER = 32 << 20, 1 << 10


class Template:
    """A compiled template. ModelFileError where its source cannot be compiled.

    `inspected`: the constant texts that it compares with or hands to a string method. `names`:
    every variable that it reads, every attribute and every constant text. `variables`: those that
    it reads and never sets.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise ModelFileError(
                f"The file's chat template has {len(source):,} characters; "
                f"{MAX_SOURCE_CHARACTERS:,} is the limit."
            )
        limits = _compiling_limits(source)
        first, *further = [Renderer(source, limits) for _ in range(PROCESSES)]
        found = _compiled(first.start(), limits)
        self.inspected = frozenset(found["inspected"])
        self.names = frozenset(found["names"])
        self.variables = frozenset(found["variables"])
        # The last in is the first out: further processes start when all others are at work.
        self._idle: LifoQueue[Renderer] = LifoQueue()
        for renderer in (*further, first):
            self._idle.put(renderer)

    def render(self, variables: Mapping[str, Any], *, now: datetime | None = None) -> str:
        """The text; RequestError where the template refuses, fails, or takes more than it may.

        `variables` hold what JSON has: dicts, lists, strings, numbers, booleans and None. `now`:
        the time that the template sees, by default this machine's. Any thread may call this.
        """
        # Version 2 writes a string each time that it occurs, so that bytes measure the work.
        body = marshal.dumps((dict(variables), now.isoformat() if now else None), 2)
        limits = _limits(variables, len(body))
        renderer = self._idle.get()
        try:
            reply = renderer.render(body, limits)
        finally:
            self._idle.put(renderer)
        return _rendered(reply, limits)


def _limits(variables: Mapping[str, Any], size: int) -> Limits:
    pairs = len(variables.get("messages", ())) ** 2
    seconds = _SECONDS + _SECONDS_PER_BYTE * size + _SECONDS_PER_PAIR * pairs
    return Limits(
        min(seconds, _MOST_SECONDS),
        _MEMORY_BYTES + _MEMORY_PER_BYTE * size,
        _TEXT_BYTES + _TEXT_PER_BYTE * size,
    )


def _compiling_limits(source: str) -> Limits:
    return Limits(
        _COMPILING_SECONDS + _COMPILING_SECONDS_PER_CHARACTER * len(source),
        _COMPILING_MEMORY_BYTES + _COMPILING_MEMORY_PER_CHARACTER * len(source),
        _TEXT_BYTES + _TEXT_PER_BYTE * len(source),
    )


def _compiled(reply: Reply | None, limits: Limits) -> dict[str, list[str]]:
    match reply:
        case Reply(Outcome.DONE, found):
            return json.loads(found)
        case Reply(Outcome.REFUSED, reason):
            raise ModelFileError(f"The file's chat template is broken: {reason}")
        case Reply(Outcome.FAILED | Outcome.FORBIDDEN, reason):
            raise ModelFileError(f"The file's chat template cannot be compiled: {reason}.")
    raise ModelFileError(
        f"The file's chat template cannot be compiled in {limits.seconds:.1f} s of processor time "
        f"and {limits.memory_bytes >> 20:,} MiB of memory; shorten it."
    )


def _rendered(reply: Reply | None, limits: Limits) -> str:
    match reply:
        case Reply(Outcome.DONE, text):
            return text
        case Reply(Outcome.REFUSED, reason):
            raise RequestError(f"The chat template refuses the conversation: {reason}")
        case Reply(Outcome.FORBIDDEN, reason):
            raise RequestError(f"The chat template is not allowed what it does: {reason}.")
        case Reply(Outcome.FAILED, reason):
            raise RequestError(f"The chat template fails on the conversation: {reason}")
        case Reply(Outcome.TOO_MUCH_MEMORY):
            limit = f"{limits.memory_bytes >> 20:,} MiB of memory"
        case Reply(Outcome.TOO_MUCH_TEXT):
            limit = f"{limits.reply_bytes:,} bytes of text"
        case _:
            limit = f"{limits.seconds:.2f} s of processor time, or crashes"
    raise RequestError(f"For this conversation the chat template needs more than {limit}.")

"""The client side of a process that renders one template."""

import os
import select
import socket
import time

from model_zoo.chat.sandbox.fork_server import ForkServer
from model_zoo.chat.sandbox.frames import (
    Outcome,
    RenderLimits,
    RenderReply,
    receive_reply,
    send_request,
)

# After this time a rendering gets a lower priority, so that it does not slow down the engine.
_NORMAL_PRIORITY_MS, _NICER = 500, 10

# One fork server per process; it holds no state of templates.
_FORK_SERVER = ForkServer()


def start_server() -> None:
    """Start the fork server without waiting; starting takes as long as loading a tokenizer."""
    _FORK_SERVER.start()


class Renderer:
    """Renders one template in a process that it starts when needed. Not thread-safe.

    `limits`: the limits for compiling `source`.
    """

    def __init__(self, source: str, limits: RenderLimits) -> None:
        self._source, self._limits = source.encode("utf-8", "surrogatepass"), limits
        self._process: _Process | None = None

    def start(self) -> RenderReply | None:
        """Starts the process and compiles; None if that exceeds the time limit or crashes.

        The text of the reply is the JSON of the texts and names in the template.
        """
        self._process = _Process(*_FORK_SERVER.connect())
        reply = self._process.exchange(self._source, self._limits)
        if reply is None or reply.outcome is not Outcome.DONE:
            self._process = None
        return reply

    def render(self, body: bytes, limits: RenderLimits) -> RenderReply | None:
        """The reply to a rendering; None if it exceeds the time limit or crashes."""
        began = time.monotonic()
        reply = self._rendered(body, limits)
        if reply is None and time.monotonic() - began < limits.seconds:
            reply = self._rendered(body, limits)  # the process was killed from outside
        return reply

    def _rendered(self, body: bytes, limits: RenderLimits) -> RenderReply | None:
        if self._process is None or self._process.owner != os.getpid():
            compiled = self.start()
            if self._process is None:
                return compiled
        process = self._process
        reply = process.exchange(body, limits, normal_priority_ms=_NORMAL_PRIORITY_MS)
        if reply is None or reply.outcome is Outcome.TOO_MUCH_MEMORY or process.has_low_priority:
            self._process = None
        return reply


class _Process:
    """A rendering process and its connection; closing the connection ends the process.

    `owner`: pid of the process that started it; forks of the owner must not read the replies.
    `has_low_priority`: whether its priority has been lowered, which cannot be undone.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection, self._pid = connection, pid
        self._replies = select.poll()
        self._replies.register(self._connection, select.POLLIN)
        self.owner = os.getpid()
        self.has_low_priority = False

    def __del__(self) -> None:
        self._connection.close()

    def exchange(
        self, body: bytes, limits: RenderLimits, *, normal_priority_ms: int | None = None
    ) -> RenderReply | None:
        try:
            send_request(self._connection, limits, body)
            if not self._replies.poll(normal_priority_ms):
                self._lower_priority()
            return receive_reply(self._connection, limits)
        except OSError:  # the process has ended
            return None

    def _lower_priority(self) -> None:
        self.has_low_priority = True
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + _NICER  # the kernel cuts it to the most
        os.setpriority(os.PRIO_PROCESS, self._pid, niceness)

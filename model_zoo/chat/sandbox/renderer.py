"""One process that has one template compiled, seen from the process that it works for."""

import os
import select
import socket
import time

from model_zoo.chat.sandbox.fork_server import ForkServer
from model_zoo.chat.sandbox.frames import Limits, Outcome, Reply, receive_reply, send_request

# What takes longer gives way to everything else on the machine, such as an engine.
_PATIENCE_MS, _NICER = 500, 10

# One for the whole process, as the interpreter is: it keeps nothing of any template.
_FORK_SERVER = ForkServer()


class Renderer:
    """Starts its process when it has none. Not for two threads at once.

    `limits` are those of compiling `source`.
    """

    def __init__(self, source: str, limits: Limits) -> None:
        self._source, self._limits = source.encode("utf-8", "surrogatepass"), limits
        self._process: _Process | None = None

    def start(self) -> Reply | None:
        """What compiling the template found, as JSON; None where that took too long or crashed."""
        self._process = _Process(*_FORK_SERVER.connect())
        reply = self._process.exchange(self._source, self._limits)
        if reply is None or reply.outcome is not Outcome.DONE:
            self._process = None
        return reply

    def render(self, body: bytes, limits: Limits) -> Reply | None:
        """None where it took too long or crashed."""
        began = time.monotonic()
        reply = self._rendered(body, limits)
        if reply is None and time.monotonic() - began < limits.seconds:
            reply = self._rendered(body, limits)  # the process was ended from outside
        return reply

    def _rendered(self, body: bytes, limits: Limits) -> Reply | None:
        if self._process is None or self._process.owner != os.getpid():
            compiled = self.start()
            if self._process is None:
                return compiled
        process = self._process
        reply = process.exchange(body, limits, patience_ms=_PATIENCE_MS)
        if reply is None or reply.outcome is Outcome.TOO_MUCH_MEMORY or process.gives_way:
            self._process = None
        return reply


class _Process:
    """A process and the connection to it, which ends it when it is closed.

    `owner`: the process that started it; a fork of that must not read its replies. `gives_way`:
    whether it has a lower priority, which it cannot raise again.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection, self._pid = connection, pid
        self._replies = select.poll()
        self._replies.register(self._connection, select.POLLIN)
        self.owner = os.getpid()
        self.gives_way = False

    def __del__(self) -> None:
        self._connection.close()

    def exchange(
        self, body: bytes, limits: Limits, *, patience_ms: int | None = None
    ) -> Reply | None:
        try:
            send_request(self._connection, limits, body)
            if not self._replies.poll(patience_ms):
                self._give_way()
            return receive_reply(self._connection, limits)
        except OSError:  # it is gone
            return None

    def _give_way(self) -> None:
        self.gives_way = True
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + _NICER  # the kernel cuts it to the most
        os.setpriority(os.PRIO_PROCESS, self._pid, niceness)

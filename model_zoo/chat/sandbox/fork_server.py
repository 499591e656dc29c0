"""Starts the processes that render templates, by forking a small server process."""

import os
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from model_zoo.chat.sandbox.frames import PID

# `sys.path` does not contain the root of an editable installation.
_ROOT = str(Path(__file__).resolve().parents[3])
_COMMAND = (
    "import socket, sys; sys.path[:] = sys.argv[2:]; "
    "from model_zoo.chat.sandbox.render_server import main; "
    "main(socket.socket(fileno=int(sys.argv[1])))"
)


class ForkServer:
    """A child process that forks others; started by `start` or at first use, restarted if it died.

    It exits when this process ends for any reason, because its control connection is then closed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._owner = 0  # pid of the process that opened the connection; its forks open their own

    def start(self) -> None:
        """Start the process if it is not running, without waiting until it is ready."""
        with self._lock:
            self._connection()

    def connect(self) -> tuple[socket.socket, int]:
        """A connection to a new process, which exits when the connection is closed, and its id.

        OSError if no process can be started.
        """
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            for _ in range(2):  # the server may have been killed since the last call
                pid = self._forked(self._connection(), theirs)
                if pid is not None:
                    return ours, pid
                self._control = None
        ours.close()
        raise OSError(f"no process can be started to render templates: {sys.executable}")

    def _connection(self) -> socket.socket:
        if self._control is None or self._owner != os.getpid():
            self._control, self._owner = self._started(), os.getpid()
        return self._control

    def _forked(self, control: socket.socket, connection: socket.socket) -> int | None:
        try:
            socket.send_fds(control, [b"\0"], [connection.fileno()])
            answer = control.recv(PID.size)
        except OSError:
            return None
        return PID.unpack(answer)[0] if answer else None

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        # Without `site`, which may import large modules; `sys.path` is passed on instead.
        options = ["-I", "-S", "-c", _COMMAND, str(theirs.fileno()), _ROOT, *sys.path]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, *options],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        weakref.finalize(ours, _end, process)
        return ours


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()

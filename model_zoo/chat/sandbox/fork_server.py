"""Starts processes that render templates, from one that is made for forking."""

import os
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from model_zoo.chat.sandbox.frames import PID

# Of an editable installation `sys.path` says nothing.
_ROOT = str(Path(__file__).resolve().parents[3])
_COMMAND = (
    "import socket, sys; sys.path[:] = sys.argv[2:]; "
    "from model_zoo.chat.sandbox.server import main; main(socket.socket(fileno=int(sys.argv[1])))"
)


class ForkServer:
    """A child process, started at first use and again when it is gone.

    It ends with this process, however that ends: its end of the connection is then closed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._owner = 0  # the process that the connection belongs to, and not to its forks

    def connect(self) -> tuple[socket.socket, int]:
        """A connection to a new process, which ends when that is closed, and its id.

        OSError where no process can be started.
        """
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            for _ in range(2):  # it may have been killed since the last time
                if self._control is None or self._owner != os.getpid():
                    self._control, self._owner = self._started(), os.getpid()
                pid = self._forked(self._control, theirs)
                if pid is not None:
                    return ours, pid
                self._control = None
        ours.close()
        raise OSError(f"no process can be started to render templates: {sys.executable}")

    def _forked(self, control: socket.socket, connection: socket.socket) -> int | None:
        try:
            socket.send_fds(control, [b"\0"], [connection.fileno()])
            answer = control.recv(PID.size)
        except OSError:
            return None
        return PID.unpack(answer)[0] if answer else None

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        # Without `site`, which may import much: this process has found its modules already.
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

"""Traces of requests as JSON lines in a file of this replica. They contain the text of users."""

import errno
import fcntl
import os
import queue
import re
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from socket import gethostname

import msgspec

from runtime.engine.tracing import TraceEvent
from runtime.errors import ConfigurationError
from serve_app.logs import get_logger

QUEUED_EVENTS = 10_000
MAX_FILES = 1024  # trace files of one model on one host

log = get_logger()


class TraceFile:
    """Writes events on its own thread to `<model>.<host>.<n>.jsonl` in `folder`, with mode 600.

    `n` is the first number that no other replica uses, so that restarts do not add files. A file of
    `max_bytes` is renamed to `.jsonl.1`, replacing an earlier one. Events are dropped and counted
    if QUEUED_EVENTS are unwritten, or if their line is longer than a file. `every`: see
    `TraceSink`. `spell`: the text of a token.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        *,
        max_bytes: int,
        every: bool,
        spell: Callable[[int], str],
    ) -> None:
        self.every = every
        self._model = model
        self._max_bytes = max_bytes
        self._spell = spell
        self._events: queue.Queue[TraceEvent | None] = queue.Queue(QUEUED_EVENTS)
        self._left_out = 0
        self._thread: threading.Thread | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path, self._lock = _unused(folder, re.sub(r"[^\w.-]", "_", model))
            self._file = _opened(self.path)
        except OSError as error:
            raise ConfigurationError(
                f"`trace_folder` {folder} cannot be used: {error.strerror or error}."
            ) from None
        log.info("traces", model=model, file=str(self.path), every_request=every)

    def write(self, event: TraceEvent) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
            self._thread.start()
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._left_out += 1

    def close(self) -> None:
        """Waits until all events are written."""
        if self._thread is not None:
            self._events.put(None)
            self._thread.join()
        self._file.close()
        self._lock.close()

    def _run(self) -> None:
        failed = False
        while (event := self._events.get()) is not None:
            try:
                self._append(event)
            except Exception as error:  # such as a full disk, or text that is not Unicode
                self._left_out += 1
                if not failed:
                    # The message is not logged, because it may quote the text.
                    reason = error.strerror if isinstance(error, OSError) else type(error).__name__
                    log.warning("trace not written", model=self._model, reason=reason)
                failed = True

    def _append(self, event: TraceEvent) -> None:
        line = self._line(event)
        if len(line) > self._max_bytes:
            self._left_out += 1
            return
        size = os.fstat(self._file.fileno()).st_size
        if size + len(line) > self._max_bytes:
            with suppress(FileNotFoundError):  # renamed before, when the next could not be opened
                self.path.replace(self.path.with_name(self.path.name + ".1"))
            full, self._file = self._file, _opened(self.path)
            full.close()
            size = 0
        if self._file.write(line) < len(line):
            self._file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _line(self, event: TraceEvent) -> bytes:
        """A line of JSON. `left_out`: number of dropped events since the start of this replica."""
        fields = {
            "request": event.request,
            "event": event.kind,
            "at_ns": event.at_ns,
            "tokens": event.tokens,
            "strings": [self._spell(token) for token in event.tokens],
            **event.facts,
        }
        if self._left_out:
            fields["left_out"] = self._left_out
        return msgspec.json.encode(fields) + b"\n"


def _unused(folder: Path, model: str) -> tuple[Path, FileIO]:
    """The path of a trace that no process writes, and its lock, held until it is closed."""
    for number in range(MAX_FILES):
        path = folder / f"{model}.{gethostname()}.{number}.jsonl"
        lock = _opened(path.with_suffix(".lock"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return path, lock
        except BlockingIOError:
            lock.close()
    raise OSError(f"{MAX_FILES:,} replicas use it")


def _opened(path: Path) -> FileIO:
    """A regular file of this user, which no other user may read, open for appending."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = FileIO(os.open(path, flags, 0o600), "a")
    state = os.fstat(file.fileno())
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
        raise OSError(f"{path.name} is not a file of this user")
    os.fchmod(file.fileno(), 0o600)
    return file

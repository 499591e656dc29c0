"""The files with the output of `caravan serve`: their places, how they are written and read."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, BinaryIO, Self

from runtime.home_directory import expanded
from serve_app.cli.log_lines import LogFilter, LogLine, parse_line

# Longer lines are read as several.
_LONGEST_LINE = 2**20
# A log that would be longer continues in a new file.
LIMIT_BYTES = 32 * 2**20


def log_path(own: Mapping[str, str], port: int) -> Path:
    """The file with all output of the server on this port."""
    return log_folder(own) / f"serve-{port}.log"


def log_folder(own: Mapping[str, str]) -> Path:
    return expanded(own.get("XDG_STATE_HOME") or "~/.local/state") / "caravan"


def latest_log(own: Mapping[str, str]) -> Path | None:
    """The file to which a server wrote last; None if there is none."""
    logs = log_folder(own).glob("serve-*.log")
    return max(logs, key=lambda path: path.stat().st_mtime_ns, default=None)


def previous_log(path: Path) -> Path:
    """The file with the lines before those of the log at `path`, which need not exist."""
    return path.with_name(f"{path.name}.1")


class LogWriter:
    """Writes the log of a server, which begins empty. When it reaches `limit_bytes`, the file
    becomes `previous_log`, and a new one begins.

    A line that cannot be written, for example because the disk is full, is lost; `warn` gets the
    reason of the first one, or why the file cannot be created. `exists`: whether it could be.
    """

    def __init__(
        self, path: Path, warn: Callable[[str], None], *, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self._path = path
        self._warn = warn
        self._limit_bytes = limit_bytes
        self._warned = False
        self.exists = True
        self._file, self._bytes = self._first_file(), 0
        self._before = b""  # written before the next line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, line: bytes) -> None:
        try:
            if self._bytes and self._bytes + len(line) > self._limit_bytes:
                self._begin_anew()
            line = self._before + line
            written = self._file.write(line)
            self._bytes += written
            # A disk that becomes full takes part of a line.
            self._before = b"" if written == len(line) else b"\n"
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._warn(
                    f"{self._path} cannot be written: {error.strerror}. The server continues; "
                    "lines of its log are lost"
                )

    def _first_file(self) -> IO[bytes]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            previous_log(self._path).unlink(missing_ok=True)
            return _emptied(self._path)
        except OSError as error:
            self._warned, self.exists = True, False
            self._warn(
                f"the log {self._path} cannot be written: {error.strerror}. The server starts "
                "without it; XDG_STATE_HOME sets another folder"
            )
            return open(os.devnull, "ab", buffering=0)

    def _begin_anew(self) -> None:
        with suppress(FileNotFoundError):  # a new file could not be created before
            self._path.replace(previous_log(self._path))
        full, self._file, self._bytes = self._file, _emptied(self._path), 0
        full.close()


def last_lines(files: Sequence[IO[bytes]], chosen: LogFilter, count: int) -> list[LogLine]:
    """The last `count` complete lines that the filter selects; reads up to the ends of the
    files."""
    lines = chain.from_iterable(map(_complete_lines, files))
    return list(deque(filter(chosen.selects, lines), maxlen=count))


def new_lines(
    path: Path, file: BinaryIO, chosen: LogFilter, wait: Callable[[], None]
) -> Iterator[LogLine]:
    """An endless iterator of selected lines written from now on; calls `wait` when there are none.
    `file`: `path`, opened, and closed at the end.

    When a starting server truncates the file, it is read from its beginning. When the log
    continues in a new file, the rest of this one is read first.
    """
    try:
        while True:
            yield from filter(chosen.selects, _complete_lines(file))
            wait()
            if os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)
            elif (new := _new_file(path, file)) is not None:
                yield from filter(chosen.selects, _complete_lines(file))
                file.close()
                file = new
    finally:
        file.close()


def _emptied(path: Path) -> IO[bytes]:
    """The file, without a buffer, which would keep lines that cannot be written."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_TRUNC, mode=0o600)

    return open(path, "ab", buffering=0, opener=opener)


def _new_file(path: Path, file: BinaryIO) -> BinaryIO | None:
    """The file at `path` if it is another one than `file`."""
    with suppress(FileNotFoundError):  # it is being replaced
        if not os.path.samestat(os.stat(path), os.fstat(file.fileno())):
            return path.open("rb")
    return None


def _complete_lines(file: IO[bytes]) -> Iterator[LogLine]:
    """The complete lines up to the end of the file; leaves a line that is still being written."""
    while raw := file.readline(_LONGEST_LINE):
        if not raw.endswith(b"\n") and len(raw) < _LONGEST_LINE:
            file.seek(-len(raw), os.SEEK_CUR)
            return
        yield parse_line(raw.decode(errors="replace"))

"""The files with the output of `caravan serve`: their places, and lines as they are written."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from serve_app.cli.log_lines import LogFilter, LogLine, parse_line

# Longer lines are read as several.
_LONGEST_LINE = 2**20


def log_path(own: Mapping[str, str], port: int) -> Path:
    """The file with all output of the server on this port."""
    return log_folder(own) / f"serve-{port}.log"


def log_folder(own: Mapping[str, str]) -> Path:
    return Path(own.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "caravan"


def latest_log(own: Mapping[str, str]) -> Path | None:
    """The file to which a server wrote last; None if there is none."""
    logs = log_folder(own).glob("serve-*.log")
    return max(logs, key=lambda path: path.stat().st_mtime_ns, default=None)


def last_lines(file: BinaryIO, chosen: LogFilter, count: int) -> list[LogLine]:
    """The last `count` complete lines that the filter selects; reads up to the end of the file."""
    selected = (line for line in _complete_lines(file) if chosen.selects(line))
    return list(deque(selected, maxlen=count))


def new_lines(file: BinaryIO, chosen: LogFilter, wait: Callable[[], None]) -> Iterator[LogLine]:
    """An endless iterator of selected lines written from now on; calls `wait` when there are none.
    When a starting server truncates the file, it is read from its beginning."""
    while True:
        yield from (line for line in _complete_lines(file) if chosen.selects(line))
        wait()
        if os.fstat(file.fileno()).st_size < file.tell():
            file.seek(0)


def _complete_lines(file: BinaryIO) -> Iterator[LogLine]:
    """The complete lines up to the end of the file; leaves a line that is still being written."""
    while raw := file.readline(_LONGEST_LINE):
        if not raw.endswith(b"\n") and len(raw) < _LONGEST_LINE:
            file.seek(-len(raw), os.SEEK_CUR)
            return
        yield parse_line(raw.decode(errors="replace"))

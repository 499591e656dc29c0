"""Detects writes to the files of a served model."""

import os
from collections.abc import Iterable
from pathlib import Path

from runtime.errors import EngineDeadError


class ServedFiles:
    """Files that this process has mapped, with their state at construction.

    A write to such a file changes the weights in use, and truncating it kills the process (SIGBUS).
    Replacing it by a rename has no effect on the process.
    """

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._found = {path: path.stat() for path in paths}

    def check(self) -> None:
        """Raises EngineDeadError if a file has been written in place since construction."""
        for path, before in self._found.items():
            try:
                now = path.stat()
            except OSError:
                continue  # the file was removed, but it is still mapped
            same = (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino)
            if same and _content(now) != _content(before):
                raise EngineDeadError(
                    f"{path} was written in place while it was served: it had {before.st_size:,} "
                    f"bytes and has {now.st_size:,} now. The replica must be replaced. Replace "
                    "a served file by renaming a new one over it, or serve the model from the "
                    "store."
                )


def _content(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns

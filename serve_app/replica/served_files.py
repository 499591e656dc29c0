"""Detects writes to the files of a served model, and warns if other users could write to them."""

import grp
import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path

from runtime.errors import EngineDeadError
from serve_app.logs import get_logger

ADVICE = "Replace a served file by renaming a new one over it, or serve the model from the store"

log = get_logger()


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
                    f"bytes and has {now.st_size:,} now. The replica must be replaced. {ADVICE}."
                )


def warn_if_writable(model: str, paths: Iterable[Path], store: Path) -> None:
    """Logs a warning for each file outside the store that other users may write."""
    for path in paths:
        real = path.resolve()
        writers = other_writers(real)
        if writers and not real.is_relative_to(store.resolve()):
            log.warning(
                "model file may be written by others",
                model=model,
                file=str(real),
                writers=writers,
                text="a write in place kills the replica or changes its weights",
                advice=ADVICE,
            )


def other_writers(path: Path) -> list[str]:
    """Users and groups that may write the file, except this process's user and root."""
    found = path.stat()
    writers = []
    if found.st_uid not in (os.geteuid(), 0) and found.st_mode & stat.S_IWUSR:
        writers.append(f"user {found.st_uid}")
    if found.st_mode & stat.S_IWGRP and _has_others(found.st_gid):
        writers.append(f"group {found.st_gid}")
    if found.st_mode & stat.S_IWOTH:
        writers.append("all users")
    return writers


def _has_others(gid: int) -> bool:
    """False for a private group of this process's user, which many systems create."""
    try:
        own = pwd.getpwuid(os.geteuid())
        members = set(grp.getgrgid(gid).gr_mem)
    except KeyError:
        return True
    return gid != own.pw_gid or bool(members - {own.pw_name})


def _content(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns

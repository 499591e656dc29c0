"""The files of a served model: who may rewrite them in place, and whether that has happened."""

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
    """Files that a process has mapped, as they are when this is made.

    What is written into such a file changes the weights that are computed with, and a file that
    gets shorter ends the process (SIGBUS). A file that takes the place of another does not.
    """

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._found = {path: path.stat() for path in paths}

    def check(self) -> None:
        """EngineDeadError when a file has been written in place since."""
        for path, before in self._found.items():
            try:
                now = path.stat()
            except OSError:
                continue  # removed: the map keeps it
            same = (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino)
            if same and _content(now) != _content(before):
                raise EngineDeadError(
                    f"{path} was written in place while it was served: it had {before.st_size:,} "
                    f"bytes and has {now.st_size:,} now. This process has to end, if a bus error "
                    f"does not end it first. {ADVICE}."
                )


def warn_of_exposed(model: str, paths: Iterable[Path], store: Path) -> None:
    """A warning in the log for each file outside the store that others may write."""
    for path in paths:
        real = path.resolve()
        writers = writers_beside_us(real)
        if writers and not real.is_relative_to(store.resolve()):
            log.warning(
                "model file may be written by others",
                model=model,
                file=str(real),
                writers=writers,
                text="a write in place ends the replica or changes its weights",
                advice=ADVICE,
            )


def writers_beside_us(path: Path) -> list[str]:
    """Users and groups that may write the file, beside this process's user and root."""
    found = path.stat()
    writers = []
    if found.st_uid not in (os.geteuid(), 0) and found.st_mode & stat.S_IWUSR:
        writers.append(f"user {found.st_uid}")
    if found.st_mode & stat.S_IWGRP and _has_others(found.st_gid):
        writers.append(f"group {found.st_gid}")
    if found.st_mode & stat.S_IWOTH:
        writers.append("everybody")
    return writers


def _has_others(gid: int) -> bool:
    """False for a group of this process's user alone, as many systems make for each user."""
    try:
        own = pwd.getpwuid(os.geteuid())
        members = set(grp.getgrgid(gid).gr_mem)
    except KeyError:
        return True
    return gid != own.pw_gid or bool(members - {own.pw_name})


def _content(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns

"""Temporary folders. If all processes that use one are killed, a later process removes it."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

# In a folder, a file on which each process that uses it has a shared lock (flock). Its name tells
# these folders from those of other programs with the same prefix.
_LOCK = "caravan-in-use"


@contextmanager
def temporary_folder(prefix: str, *, within: Path | None = None) -> Iterator[Path]:
    """A new folder, which is removed at the end. Also removes folders with the same prefix whose
    processes have been killed. `within`: the parent folder, by default that for temporary files."""
    parent = Path(tempfile.gettempdir()) if within is None else within
    for folder in parent.glob(f"{prefix}*"):
        _remove_abandoned(folder)
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as name,
        Path(name, f"{_LOCK}.new").open("x") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_SH)
        Path(lock.name).rename(Path(name, _LOCK))  # so others never see it unlocked
        yield Path(name)


def hold(folder: Path) -> None:
    """Keeps a temporary folder of another process until this one ends. Other folders need nothing
    that keeps them."""
    with suppress(OSError):
        # Never closed, so that the lock ends with the process. Children do not inherit it.
        fcntl.flock(os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW), fcntl.LOCK_SH)


def _remove_abandoned(folder: Path) -> None:
    """Removes a folder of this user whose lock file no process has locked. Without the file, it
    stays."""
    with ExitStack() as opened:
        try:
            inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, inside)
            if os.fstat(inside).st_uid != os.geteuid():
                return
            lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW, dir_fd=inside)
            opened.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        shutil.rmtree(folder, ignore_errors=True)

"""Removal of files that processes may map; those that do hold a shared lock (flock)."""

import errno
import fcntl
from contextlib import ExitStack
from pathlib import Path


def remove_unmapped(path: Path) -> bool:
    """Removes the file, if it exists. False if a process maps it, or this user may
    not find that out. OSError if it cannot be removed.

    To remove a mapped file of a network file system would end processes of other hosts by SIGBUS;
    see `model_zoo.gguf.model_headers.FilePart`.
    """
    if path.is_symlink():  # its target stays
        path.unlink(missing_ok=True)
        return True
    with ExitStack() as opened:
        try:
            _lock_exclusively(path, opened)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        path.unlink(missing_ok=True)
    return True


def _lock_exclusively(path: Path, opened: ExitStack) -> None:
    """OSError if the file is locked or cannot be. To open it for writing is avoided, since that may
    be forbidden, or copy the file (overlayfs)."""
    try:
        fcntl.flock(opened.enter_context(path.open("rb")), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EBADF:  # NFS: only a writer gets an exclusive lock
            raise
        fcntl.flock(opened.enter_context(path.open("r+b")), fcntl.LOCK_EX | fcntl.LOCK_NB)

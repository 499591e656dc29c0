"""Which compilers have failed to compile the CPU kernels, so that not every process tries again.

A failure is a file beside the libraries. Its name has the stem of the library's name, which changes
with sources and options, and a digest of the compiler's file and of this host, which may share the
folder with others. It counts for an hour only, because a compiler may also lack what its file does
not show, such as headers or memory.
"""

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

COUNTS_FOR_S = 3600.0


def remember(folder: Path, stem: str, compiler: str, reason: str) -> None:
    """That `compiler`, a path, cannot make the library whose name begins with `stem`."""
    with suppress(OSError):
        _file(folder, stem, compiler).write_text(reason)


def remembered(folder: Path, stem: str, compiler: str) -> str | None:
    """The reason of a failure that still counts."""
    with suppress(OSError, UnicodeDecodeError):
        file = _file(folder, stem, compiler)
        if abs(time.time() - file.stat().st_mtime) < COUNTS_FOR_S:
            return file.read_text() or None  # empty on a disk that was full
    return None


def forget(folder: Path, *, older_than_s: float = 0.0) -> None:
    """All failures in a folder, if it can be read."""
    oldest, found = time.time() - older_than_s, list[Path]()
    with suppress(OSError):
        found += folder.glob("kernels-*.failed")
    for file in found:
        with suppress(OSError):  # another process or user removes it
            if file.stat().st_mtime <= oldest:
                file.unlink()


def _file(folder: Path, stem: str, compiler: str) -> Path:
    """OSError: there is no such compiler."""
    status = os.stat(compiler)
    identity = (os.uname().nodename, compiler, status.st_ino, status.st_size, status.st_mtime_ns)
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()
    return folder / f"{stem}-{digest[:24]}.failed"

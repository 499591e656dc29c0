"""Files of this machine become blobs of a store: by a reflink, a hard link, or a copy."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from model_zoo.sources.pull import Progress, PullProgress, placeholder_digest, unheard
from model_zoo.store.manifest import LAYER_TYPE, Layer
from model_zoo.store.store import Store, file_error
from runtime.errors import SourceError

_READ_BYTES = 16 << 20
_FICLONE = 0x40049409  # linux/fs.h: a file gets the blocks of another, until one of them changes


def import_file(
    path: Path, store: Store, *, may_link: bool = False, progress: Progress | None = None
) -> Layer:
    """The file as a blob of the store, and a layer of kind "model" of it.

    What becomes of the file later does not reach the store, except with `may_link`: then the blob
    may be a hard link, for files that are replaced rather than written again. StoreError when the
    file cannot be read or kept, SourceError when it changes meanwhile.
    """
    tell = progress or unheard
    path = path.resolve()
    before = _state(path)
    known = store.linked(path) if may_link else None
    if known is not None:
        return Layer(f"{LAYER_TYPE}model", known, before.st_size)
    gathered = store.temporary()
    try:
        if _reflink(path, gathered) or (may_link and _hard_link(path, gathered)):
            digest = _digest(path, gathered, tell)
        else:
            store.check_room([Layer("", f"sha256:{'0' * 64}", before.st_size)])
            digest = _copy(path, gathered, tell)
        now = _state(path)
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise SourceError(f"{path}: it has changed while it was imported; try again.")
        layer = Layer(f"{LAYER_TYPE}model", digest, before.st_size)
        store.place(gathered, layer)
        return layer
    except OSError as error:
        raise file_error("import", path, error) from error
    finally:
        gathered.unlink(missing_ok=True)


def _reflink(path: Path, target: Path) -> bool:
    """False where the file system has none, or `path` is on another one."""
    try:
        with path.open("rb") as source, target.open("wb") as clone:
            fcntl.ioctl(clone, _FICLONE, source.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True


def _hard_link(path: Path, target: Path) -> bool:
    """False on another file system, and for a file that this user may not link."""
    try:
        os.link(path, target)
    except OSError:
        return False
    return True


def _digest(path: Path, linked: Path, tell: Progress) -> str:
    """Of `linked`, which is the same file as `path`."""
    digest = hashlib.sha256()
    for data in _pieces(linked, PullProgress(f"reading {path.name}", _placeholder(path)), tell):
        digest.update(data)
    return f"sha256:{digest.hexdigest()}"


def _copy(path: Path, target: Path, tell: Progress) -> str:
    """The digest of what was copied."""
    digest = hashlib.sha256()
    with target.open("wb") as copy:
        for data in _pieces(path, PullProgress(f"copying {path.name}", _placeholder(path)), tell):
            digest.update(data)
            copy.write(data)
        copy.flush()
        os.fsync(copy.fileno())
    return f"sha256:{digest.hexdigest()}"


def _pieces(path: Path, step: PullProgress, tell: Progress) -> Iterator[bytes]:
    """`step`: the progress that is reported, but for the bytes."""
    size, done = path.stat().st_size, 0
    tell(replace(step, total=size))
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            yield data
            done += len(data)
            tell(replace(step, total=size, completed=done))


def _placeholder(path: Path) -> str:
    return placeholder_digest(str(path))


def _state(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise file_error("read", path, error) from error

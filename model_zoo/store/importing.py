"""Imports files of this machine as blobs: by a reflink, a hard link, or a copy."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from model_zoo.sources.pull import Progress, PullProgress, ignore_progress, placeholder_digest
from model_zoo.store.file_access import file_error
from model_zoo.store.manifest import LAYER_TYPE, ManifestLayer
from model_zoo.store.store import Store
from runtime.errors import SourceError

_READ_BYTES = 16 << 20
_FICLONE = 0x40049409  # linux/fs.h: shares the blocks of another file, copy-on-write


def import_file(
    path: Path, store: Store, *, may_link: bool = False, progress: Progress | None = None
) -> ManifestLayer:
    """Imports the file as a blob, and returns a layer of kind "model".

    Later changes of the file do not change the blob, unless `may_link`: then the blob may be a hard
    link, which suits files that are replaced and never rewritten. StoreError if the file cannot be
    read or stored, SourceError if it changes during the import.
    """
    report = progress or ignore_progress
    path = path.resolve()
    before = _state(path)
    known = store.find_linked(path) if may_link else None
    if known is not None:
        return ManifestLayer(f"{LAYER_TYPE}model", known, before.st_size)
    imported = store.temporary()
    try:
        if _reflink(path, imported) or (may_link and _hard_link(path, imported)):
            digest = _digest(path, imported, report)
        else:
            store.check_space([ManifestLayer("", f"sha256:{'0' * 64}", before.st_size)])
            digest = _copy(path, imported, report)
        now = _state(path)
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise SourceError(f"{path}: the file changed during the import; try again.")
        layer = ManifestLayer(f"{LAYER_TYPE}model", digest, before.st_size)
        store.install(imported, layer)
        return layer
    except OSError as error:
        raise file_error(f"import {path}", store.root, error) from error
    finally:
        imported.unlink(missing_ok=True)


def _reflink(path: Path, target: Path) -> bool:
    """False if the file system has no reflinks, or `path` is on another one."""
    try:
        with path.open("rb") as source, target.open("wb") as clone:
            fcntl.ioctl(clone, _FICLONE, source.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True


def _hard_link(path: Path, target: Path) -> bool:
    """False if `path` is on another file system, or this user may not link it."""
    try:
        os.link(path, target)
    except OSError:
        return False
    return True


def _digest(path: Path, linked: Path, report: Progress) -> str:
    """The digest of `linked`, which is the same file as `path`."""
    digest = hashlib.sha256()
    for data in _blocks(linked, PullProgress(f"reading {path.name}", _placeholder(path)), report):
        digest.update(data)
    return f"sha256:{digest.hexdigest()}"


def _copy(path: Path, target: Path, report: Progress) -> str:
    """Copies the file, and returns the digest of the copy."""
    digest = hashlib.sha256()
    with target.open("wb") as copy:
        for data in _blocks(path, PullProgress(f"copying {path.name}", _placeholder(path)), report):
            digest.update(data)
            copy.write(data)
    return f"sha256:{digest.hexdigest()}"


def _blocks(path: Path, step: PullProgress, report: Progress) -> Iterator[bytes]:
    """The file's content in blocks; reports `step` with the byte counts after each."""
    size, done = _state(path).st_size, 0
    report(replace(step, total=size))
    for data in _contents(path):
        yield data
        done += len(data)
        report(replace(step, total=size, completed=done))


def _contents(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                yield data
    except OSError as error:
        raise file_error("read", path, error) from error


def _placeholder(path: Path) -> str:
    return placeholder_digest(str(path))


def _state(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise file_error("read", path, error) from error

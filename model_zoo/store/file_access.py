"""Access to the files of a store: errors in the words of users, manifests, empty folders."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime.errors import StorageFullError, StoreError


def file_error(verb: str, path: Path, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(f"{path}: cannot {verb}: the disk is full.")
    return StoreError(f"{path}: cannot {verb}: {error.strerror}.")


@contextmanager
def file_errors(verb: str, path: Path) -> Iterator[None]:
    """Raises a `file_error` for an OSError."""
    try:
        yield
    except OSError as error:
        raise file_error(verb, path, error) from error


def manifest_paths(root: Path, *, all_readable: bool = True) -> list[Path]:
    """The paths of manifests in a folder of them, ours or Ollama's; none if it does not exist.
    StoreError if a folder cannot be read, which `glob` would conceal; unless `all_readable`, only
    if that is `root`, and the folders below it are left out. Nor may `root`, or one above it, be a
    file."""
    try:
        folders = list(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise file_error("read", root, error) from error
    for _ in range(3):  # namespace, model, tag
        found: list[Path] = []
        for folder in folders:
            with suppress(*(() if all_readable else (StoreError,))):
                found += _entries(folder)
        folders = found
    return sorted(folders)


def remove_empty_folders(folder: Path, root: Path) -> None:
    """Removes the folder and those above it up to `root`, as far as they are empty."""
    while folder != root:
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


def disk_bytes(path: Path) -> int:
    """The bytes that the file takes on disk, without holes; 0 if it does not exist."""
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # removed now, or a file that is not ours
        return []
    except OSError as error:
        raise file_error("read", folder, error) from error

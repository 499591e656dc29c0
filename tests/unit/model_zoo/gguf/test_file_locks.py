"""The locks of mapped files, by which the store knows that it must not remove them."""

import errno
import fcntl
import gc
import os
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

import pytest

from model_zoo.gguf.reader import GGUFFile
from runtime.errors import ModelFileError
from tests.unit.model_zoo.gguf.gguf_bytes import Parts, tensor


def write(path: Path, parts: Parts) -> GGUFFile:
    path.write_bytes(parts.bytes())
    return GGUFFile.open(path)


def is_locked(path: Path) -> bool:
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_file_is_locked_as_long_as_a_view_of_it_exists(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    file = write(path, Parts(tensors=[tensor("a", [8, 8])], data=bytes(256)))
    weight = file.weight("a")
    del file
    gc.collect()
    assert is_locked(path)
    del weight
    assert not is_locked(path)


def test_a_file_that_another_process_removes_now_is_not_opened(tmp_path, monkeypatch) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, Parts())
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ModelFileError, match="another process has locked it"):
            GGUFFile.open(path)
    flock = fcntl.flock

    def late(file: BinaryIO, operation: int) -> None:
        path.unlink(missing_ok=True)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ModelFileError, match="there is no such file"):
        GGUFFile.open(path)


@pytest.mark.parametrize(
    ("number", "opens"), [(errno.ENOLCK, True), (errno.ENOSYS, True), (errno.ESTALE, False)]
)
def test_a_file_system_needs_no_locks(tmp_path, monkeypatch, number, opens) -> None:
    """ESTALE: a network file system has removed the file."""
    path = tmp_path / "tiny.gguf"
    write(path, Parts())

    def fail(file: BinaryIO, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with nullcontext() if opens else pytest.raises(ModelFileError, match="Stale file handle"):
        GGUFFile.open(path)

"""Partial blobs: only bytes that the disk has are counted, and errors of closing are reported."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from model_zoo.sources import partial
from model_zoo.sources.partial import PartialBlob
from model_zoo.store.store import journal_of
from runtime.errors import StorageFullError, StoreError

SIZE, PART = 1000, 500


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "blob-partial"


@pytest.fixture(autouse=True)
def counted_bytes(monkeypatch) -> None:
    monkeypatch.setattr(partial, "COUNTED_BYTES", 100)


def opened(path: Path) -> PartialBlob:
    return PartialBlob(path, size=SIZE, part_bytes=PART)


def counts(path: Path) -> list[int]:
    """What another process would find."""
    raw = journal_of(path).read_bytes()[16:]
    return [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]


def failing(function: Callable[..., object], number: int, *, calls: int) -> Callable[..., object]:
    """The function, whose first `calls` calls raise this error after they took effect."""
    left = [calls]

    def call(*arguments: object) -> object:
        done = function(*arguments)
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))
        return done

    return call


def test_bytes_are_counted_when_enough_are_written_and_at_the_end(path) -> None:
    with opened(path) as blob:
        first, second = blob.parts
        blob.write(first, bytes(60))
        assert counts(path) == [0, 0]
        blob.write(second, bytes(40))
        assert counts(path) == [60, 40]
        blob.write(first, bytes(7))
        assert counts(path) == [60, 40]
    assert counts(path) == [67, 40]
    with opened(path) as blob:
        assert [part.done for part in blob.parts] == [67, 40]


def test_a_file_of_another_size_than_its_journal_says_is_begun_again(path) -> None:
    with opened(path) as blob:
        blob.write(blob.parts[0], bytes(60))
    os.truncate(path, 30)
    with opened(path) as blob:
        assert [part.done for part in blob.parts] == [0, 0]
    assert path.stat().st_size == SIZE


def test_bytes_that_an_interrupt_ends_are_counted(path) -> None:
    with pytest.raises(KeyboardInterrupt), opened(path) as blob:
        blob.write(blob.parts[0], bytes(60))
        raise KeyboardInterrupt
    assert counts(path) == [60, 0]


def test_bytes_that_the_disk_refuses_later_are_never_counted(path, monkeypatch) -> None:
    """A network file system reports such an error once, and drops the bytes."""
    with pytest.raises(StorageFullError, match="the disk is full"), opened(path) as blob:
        blob.write(blob.parts[0], bytes(100))
        monkeypatch.setattr(os, "fdatasync", failing(os.fdatasync, errno.ENOSPC, calls=1))
        blob.write(blob.parts[0], bytes(100))
    assert counts(path) == [100, 0]


def test_after_a_failed_write_nothing_is_counted(path, monkeypatch) -> None:
    with pytest.raises(StorageFullError), opened(path) as blob:
        blob.write(blob.parts[0], bytes(60))
        monkeypatch.setattr(os, "pwrite", failing(os.pwrite, errno.EDQUOT, calls=1))
        blob.write(blob.parts[0], bytes(10))
    assert counts(path) == [0, 0]


def descriptors(path: Path) -> list[str]:
    """The files beside `path` that this process has open."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    targets = [os.readlink(link) for link in links if link.is_symlink()]
    return [target for target in targets if target.startswith(str(path.parent))]


@pytest.mark.parametrize("calls", [1, 2])
def test_an_error_of_closing_is_reported_and_closes_both_files(path, monkeypatch, calls) -> None:
    monkeypatch.setattr(os, "close", failing(os.close, errno.EDQUOT, calls=calls))
    blob = opened(path)
    assert len(descriptors(path)) == 2
    with pytest.raises(StorageFullError, match=f"{path}: cannot write: the disk is full"), blob:
        pass
    monkeypatch.undo()
    assert descriptors(path) == []


def test_an_error_of_closing_does_not_hide_an_interrupt(path, monkeypatch) -> None:
    monkeypatch.setattr(os, "close", failing(os.close, errno.EDQUOT, calls=1))
    with pytest.raises(KeyboardInterrupt), opened(path):
        raise KeyboardInterrupt


def test_a_blob_whose_journal_cannot_be_opened_leaves_no_file_open(path, tmp_path) -> None:
    journal_of(path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="journal: cannot write"):
        opened(path)
    assert descriptors(path) == []


def test_a_disk_without_space_for_the_journal_leaves_no_file_open(path, monkeypatch) -> None:
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, errno.ENOSPC, calls=1))
    with pytest.raises(StorageFullError):
        opened(path)
    monkeypatch.undo()
    assert descriptors(path) == []

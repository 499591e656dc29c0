"""Files become blobs: blocks are shared where that is safe, otherwise copied."""

import errno
import fcntl
import hashlib
import os
import shutil
from pathlib import Path

import pytest

from model_zoo.store import importing
from model_zoo.store.importing import import_file
from model_zoo.store.store import Store
from runtime.errors import SourceError, StorageFullError, StoreError

CONTENT = b"some bytes" * 1000
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "model.gguf").write_bytes(CONTENT)
    return tmp_path / "model.gguf"


@pytest.fixture(autouse=True)
def no_reflinks(monkeypatch) -> None:
    """Makes the tests independent of the file system."""
    monkeypatch.setattr(importing, "_reflink", lambda path, target: False)


def blobs(store: Store) -> list[str]:
    return sorted(path.name for path in (store.root / "blobs").iterdir())


@pytest.mark.parametrize("may_link", [False, True])
def test_a_file_becomes_a_blob_and_leaves_no_other_file(store, file, may_link):
    layer = import_file(file, store, may_link=may_link)
    assert (layer.kind, layer.digest, layer.size) == ("model", DIGEST, len(CONTENT))
    assert store.blob(DIGEST).read_bytes() == CONTENT
    assert blobs(store) == [DIGEST.replace(":", "-")]
    assert store.blob(DIGEST).samefile(file) == may_link


@pytest.mark.parametrize("may_link", [False, True])
def test_a_blob_is_on_the_disk_before_it_has_its_name(store, file, may_link, monkeypatch):
    synced = []

    def sync(descriptor: int) -> None:
        assert not store.blob(DIGEST).exists()
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", sync)
    import_file(file, store, may_link=may_link)
    assert synced == [store.blob(DIGEST).stat().st_ino]


def test_a_copy_does_not_change_with_the_file(store, file):
    import_file(file, store)
    file.write_bytes(b"something else")
    assert store.blob(DIGEST).read_bytes() == CONTENT


def test_a_link_to_a_file_is_followed(store, file, tmp_path):
    """The cache of the Hub's own tools has such links."""
    (tmp_path / "link.gguf").symlink_to(file)
    import_file(tmp_path / "link.gguf", store, may_link=True)
    assert not store.blob(DIGEST).is_symlink() and store.blob(DIGEST).samefile(file)


def test_a_linked_file_is_not_read_again(store, file):
    first = import_file(file, store, may_link=True)
    reported = []
    assert import_file(file, store, may_link=True, progress=reported.append) == first
    assert import_file(store.blob(DIGEST), store, may_link=True, progress=reported.append) == first
    assert reported == [] and blobs(store) == [DIGEST.replace(":", "-")]


def test_a_file_that_cannot_be_linked_is_copied(store, file, monkeypatch):
    def refuse(source, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    import_file(file, store, may_link=True)
    assert store.blob(DIGEST).read_bytes() == CONTENT and not store.blob(DIGEST).samefile(file)


def test_a_reflink_is_preferred_to_a_hard_link(store, file, monkeypatch):
    monkeypatch.undo()

    def clone(target, request, source):
        assert request == 0x40049409  # FICLONE of linux/fs.h
        os.write(target.fileno(), os.pread(source, len(CONTENT), 0))

    monkeypatch.setattr(fcntl, "ioctl", clone)
    layer = import_file(file, store, may_link=True)
    assert layer.digest == DIGEST and store.blob(DIGEST).read_bytes() == CONTENT
    assert not store.blob(DIGEST).samefile(file)


def test_a_file_system_without_reflinks_is_no_error(store, file, monkeypatch):
    monkeypatch.undo()

    def refuse(target, request, source):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    assert import_file(file, store, may_link=True).digest == DIGEST


@pytest.mark.parametrize("may_link", [False, True])
def test_progress_counts_the_files_bytes(store, file, monkeypatch, may_link):
    monkeypatch.setattr(importing, "_READ_BYTES", 4096)
    reported = []
    import_file(file, store, may_link=may_link, progress=reported.append)
    assert {step.status for step in reported} == {
        f"{'reading' if may_link else 'copying'} model.gguf"
    }
    assert [step.completed for step in reported] == [0, 4096, 8192, len(CONTENT)]
    assert {step.total for step in reported} == {len(CONTENT)}


@pytest.mark.parametrize("may_link", [False, True])
def test_each_file_has_a_progress_bar_of_its_own(store, file, tmp_path, may_link):
    """Clients keep one progress bar per digest."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / file.name).write_bytes(b"other bytes")
    reported = []
    for path in (file, folder / file.name):
        import_file(path, store, may_link=may_link, progress=reported.append)
    bars = {step.digest: step.total for step in reported}
    assert [*bars.values()] == [len(CONTENT), len(b"other bytes")]
    assert len({digest[7:19] for digest in bars}) == 2, "Ollama's clients show these characters"


@pytest.mark.parametrize("may_link", [False, True])
def test_a_file_that_changes_during_the_import_is_refused(store, file, may_link):
    with pytest.raises(SourceError, match="file changed during the import"):
        import_file(file, store, may_link=may_link, progress=lambda step: file.write_bytes(b"x"))
    assert blobs(store) == []


def test_a_failed_import_leaves_nothing(store, file, tmp_path, monkeypatch):
    with pytest.raises(StoreError, match=r"nowhere\.gguf: cannot read"):
        import_file(tmp_path / "nowhere.gguf", store)
    full = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(StoreError, match="10 bytes free"):
        import_file(file, store)
    assert blobs(store) == []


def test_a_full_store_is_named_and_not_the_file(store, file, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFullError) as refused:
        import_file(file, store)
    assert str(refused.value) == f"{store.root}: cannot import {file}: the disk is full."
    assert blobs(store) == []


def test_a_file_that_cannot_be_read_is_named(store, file, monkeypatch):
    def denied(path, mode):
        if path == file:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return true_open(path, mode)

    true_open = Path.open
    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(StoreError) as refused:
        import_file(file, store)
    assert str(refused.value) == f"{file}: cannot read: Permission denied."
    assert blobs(store) == []


def test_a_cancelled_import_leaves_nothing(store, file):
    def give_up(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_file(file, store, progress=give_up)
    assert blobs(store) == []

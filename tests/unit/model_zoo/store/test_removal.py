"""Safe removal: of models, unused and damaged blobs, interrupted downloads and locks."""

import errno
import fcntl
import os
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Removal, Store, journal_of
from runtime.errors import SourceError
from tests.loopback import digest
from tests.unit.model_zoo.store.stored_layers import commit, layer, put


def test_damage_of_the_same_size_is_found_by_reading(store) -> None:
    sound, damaged = put(store, b"weights"), put(store, b"template", "template")
    model = commit(store, "tiny", sound, damaged)
    store.blob(damaged.digest).write_bytes(b"tEmplate")
    assert not store.discard(sound)
    assert store.discard(damaged)
    assert store.missing(model.manifest) == [damaged]


def test_a_blob_that_was_repaired_meanwhile_is_not_removed(store) -> None:
    entry = put(store, b"weights")
    path = store.blob(entry.digest)
    path.write_bytes(b"wEights")
    with ThreadPoolExecutor(1) as pool:
        with store.blob_lock(entry.digest):
            dropping = pool.submit(store.discard, entry)  # waits for the lock, or removes the blob
            wait([dropping], timeout=0.2)
            path.write_bytes(b"weights")
        assert not dropping.result()
    assert path.read_bytes() == b"weights"


def test_removing_a_model_keeps_blobs_of_others(store) -> None:
    shared, own = put(store, b"shared weights"), put(store, b"own", "system")
    commit(store, "one", shared, own)
    commit(store, "two", shared)
    assert store.remove(ModelName.parse("one")).freed_bytes == len(b"own")
    assert store.open(ModelName.parse("two")).files[0].read_bytes() == b"shared weights"
    assert store.remove(ModelName.parse("two")).freed_bytes == len(b"shared weights")
    assert list((store.root / "blobs").iterdir()) == []
    assert list((store.root / "manifests").iterdir()) == []


@contextmanager
def mapped(path: Path):
    """As by a process that serves a model; without validation."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def test_a_mapped_blob_is_removed_when_it_is_not_mapped_any_more(store) -> None:
    """On a network file system, processes of other hosts would be ended."""
    weights, system = put(store, b"weights"), put(store, b"Be brief.", "system")
    commit(store, "one", weights, system)
    tomorrow = Store(store.root, clock=lambda: time.time() + 25 * 3600)
    with mapped(store.blob(weights.digest)):
        removal = store.remove(ModelName.parse("one"))
        assert removal == Removal(len(b"Be brief."), (weights,))
        assert store.remove_blobs(removal.mapped) == Removal(0, (weights,))
        assert tomorrow.remove_unused() == 0
        assert store.holds(weights) and not store.holds(system)
    assert store.remove_blobs(removal.mapped) == Removal(len(b"weights"), ())
    assert [*(store.root / "blobs").iterdir()] == [] and locks(store) == set()


def test_a_mapped_blob_that_a_new_model_uses_is_not_removed(store) -> None:
    weights = put(store, b"weights")
    commit(store, "one", weights)
    with mapped(store.blob(weights.digest)):
        removal = store.remove(ModelName.parse("one"))
    commit(store, "two", weights)
    assert store.remove_blobs(removal.mapped) == Removal(0, ())
    assert store.holds(weights)


def test_a_damaged_blob_that_is_mapped_makes_way_for_the_next_pull(store) -> None:
    weights = put(store, b"weights")
    path = store.blob(weights.digest)
    path.write_bytes(b"wEights")
    with mapped(path):
        assert store.discard(weights)
        (aside,) = (store.root / "blobs").iterdir()
        assert aside.read_bytes() == b"wEights" and not path.exists()
        put(store, b"weights")
    store.remove_unused(older_than_s=-1)
    assert [*(store.root / "blobs").iterdir()] == []


def test_where_only_writers_get_exclusive_locks_blobs_are_removed(store, monkeypatch) -> None:
    """As on NFS."""
    entry = put(store, b"weights")
    commit(store, "one", entry)
    flock = fcntl.flock

    def strict(file, operation: int) -> None:
        writes = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        if operation & fcntl.LOCK_EX and not writes:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", strict)
    with mapped(store.blob(entry.digest)):
        assert store.remove(ModelName.parse("one")).mapped == (entry,)
    assert store.remove_blobs([entry]).freed_bytes == len(b"weights")


def test_removing_a_damaged_manifest_frees_no_blobs_of_others(store) -> None:
    commit(store, "sound", put(store, b"weights"))
    broken = store.root / "manifests" / "registry.ollama.ai" / "library" / "broken" / "latest"
    broken.parent.mkdir()
    broken.write_text("{")
    assert (
        store.remove(ModelName.parse("sound")).freed_bytes == 0
    )  # the blobs of `broken` are unknown
    assert len(list((store.root / "blobs").iterdir())) == 1
    with pytest.raises(SourceError):
        store.remove_unused(older_than_s=0)
    store.remove(ModelName.parse("broken"))
    assert store.remove_unused(older_than_s=0) > 0
    assert list((store.root / "blobs").iterdir()) == []


def test_new_unused_blobs_are_kept(store) -> None:
    put(store, b"just come, to be committed soon")
    assert store.remove_unused() == 0
    assert len(list((store.root / "blobs").iterdir())) == 1


def test_old_unused_blobs_are_removed(store) -> None:
    commit(store, "one", put(store, b"weights"))
    put(store, b"a blob that no model uses")
    download, upload = store.partial(digest(b"1")), store.partial(digest(b"2")).with_suffix(".id")
    for path in (download, journal_of(download), upload):
        path.write_bytes(b"x" * 5000)
    killed = store.root / ".creating-killed"
    killed.mkdir()
    (killed / "made.gguf").write_bytes(b"x" * 5000)
    assert store.remove_unused() == 0 and killed.exists()
    tomorrow = Store(store.root, clock=lambda: time.time() + 25 * 3600)
    assert tomorrow.remove_unused() > 20_000
    assert not killed.exists()
    assert [path.name for path in (store.root / "blobs").iterdir()] == [
        store.blob(digest(b"weights")).name
    ]


def locks(store: Store) -> set[str]:
    return {path.name.partition("-")[2] for path in (store.root / "locks").glob("sha256-*")}


def lock_of(data: bytes) -> str:
    return f"{digest(data).removeprefix('sha256:')}.lock"


def test_the_lock_of_a_blob_is_removed_with_the_blob(store) -> None:
    commit(store, "one", put(store, b"weights"))
    commit(store, "two", put(store, b"others"))
    put(store, b"a blob that no model uses")
    store.partial(digest(b"a download")).write_bytes(b"x")
    with store.blob_lock(digest(b"a download")):
        pass
    store.remove(ModelName.parse("one"))
    kept = {lock_of(b"others"), lock_of(b"a blob that no model uses"), lock_of(b"a download")}
    assert locks(store) == kept
    store.remove_unused(older_than_s=0)
    assert locks(store) == {lock_of(b"others")}


def test_a_lock_that_is_held_is_not_removed(store) -> None:
    commit(store, "other", put(store, b"others"))
    with store.blob_lock(digest(b"new")):
        store.remove_unused()
        assert lock_of(b"new") in locks(store)
        with pytest.raises(Timeout):
            FileLock(store.root / "locks" / f"sha256-{lock_of(b'new')}").acquire(blocking=False)
    store.remove_unused()
    assert locks(store) == {lock_of(b"others")}


def test_a_lock_that_is_removed_after_it_was_opened_is_opened_again(store, monkeypatch) -> None:
    """Otherwise the next process would create the file anew, and both would hold the lock."""
    commit(store, "other", put(store, b"others"))
    flock, removed = fcntl.flock, []

    def late(file: int, operation: int) -> None:
        if not removed:
            removed.append(lock_of(b"new") in locks(store))
            store.remove_unused()
            removed.append(lock_of(b"new") not in locks(store))
        flock(file, operation)

    monkeypatch.setattr("fcntl.flock", late)
    with store.blob_lock(digest(b"new")):
        assert removed == [True, True]
        with pytest.raises(Timeout):
            FileLock(store.root / "locks" / f"sha256-{lock_of(b'new')}").acquire(blocking=False)


def test_complete_blobs_are_kept_while_a_download_makes_progress(store, monkeypatch) -> None:
    """Downloading the other blobs of a large model may take longer than a day."""
    unused = put(store, b"a part of the model that is being downloaded")
    stale, active = store.partial(digest(b"1")), store.partial(digest(b"2"))
    for path in (stale, active):
        path.write_bytes(b"x")
    tomorrow = time.time() + 25 * 3600
    changes = Store._changes
    monkeypatch.setattr(
        Store,
        "_changes",
        lambda self: {**changes(self), **({active: tomorrow} if active.exists() else {})},
    )
    store = Store(store.root, clock=lambda: tomorrow)
    store.remove_unused()
    assert store.holds(unused) and active.exists() and not stale.exists()
    active.unlink()
    store.remove_unused()
    assert not store.holds(unused)


def test_a_download_that_is_resumed_after_a_day_is_kept_with_the_blobs_of_its_model(store) -> None:
    """Before its first byte, which a busy server may delay, a resumed download changes nothing."""
    complete = put(store, b"a part of the model that is being downloaded")
    resumed, other = store.partial(digest(b"1")), store.partial(digest(b"2"))
    for path in (resumed, journal_of(resumed), other):
        path.write_bytes(b"x")
    tomorrow = Store(store.root, clock=lambda: time.time() + 25 * 3600)
    with store.blob_lock(digest(b"1")):
        tomorrow.remove_unused()
        assert resumed.exists() and journal_of(resumed).exists() and not other.exists()
        assert store.holds(complete)
    tomorrow.remove_unused()
    assert [*(store.root / "blobs").iterdir()] == []


def test_a_download_that_made_progress_before_the_sweep_locked_it_is_kept(
    store, monkeypatch
) -> None:
    partial = store.partial(digest(b"1"))
    partial.write_bytes(b"x")
    commit(store, "other", put(store, b"others"))
    tomorrow = Store(store.root, clock=lambda: time.time() + 25 * 3600)
    now = partial.stat().st_ctime
    monkeypatch.setattr(Store, "_changes", lambda self: {partial: now})
    monkeypatch.setattr(Store, "_changed_at", lambda self, path: now + 25 * 3600)
    tomorrow.remove_unused()
    assert partial.exists()


def test_a_new_link_to_an_old_file_is_kept(store, tmp_path) -> None:
    origin = tmp_path / "old"
    origin.write_bytes(b"weights")
    os.utime(origin, (0, 0))
    store.link(layer(b"weights"), origin)
    assert store.remove_unused(older_than_s=60) == 0
    assert store.holds(layer(b"weights"))

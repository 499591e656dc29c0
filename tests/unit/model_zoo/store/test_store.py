"""The store: complete files only, locks, and names that cannot leave it."""

import errno
import fcntl
import json
import os
import threading

import pytest

from model_zoo.store.manifest import LAYER_TYPE, Manifest, ManifestLayer, is_file_name
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store, default_root, journal_of
from runtime.errors import SourceError, StoreError
from tests.denied_access import deny
from tests.loopback import digest
from tests.patience import HANG_S
from tests.unit.model_zoo.store.stored_layers import commit, layer, put

NAME = ModelName.parse("tiny")
OUTSIDE = ["../x", "..", "/x", "a/../b", ".hidden", "", "a" * 300, "x\0", "a\\b", "\u202ex", "a\nb"]


def test_a_model_is_found_by_its_name_with_all_its_layers(store) -> None:
    model = commit(store, "Tiny", put(store, b"weights"), put(store, b"Be brief.", "system"))
    assert model == store.open(ModelName.parse("tiny:LATEST"))
    assert [path.read_bytes() for path in model.files] == [b"weights"]
    (system,) = model.manifest.of_kind("system")
    assert store.text(system) == "Be brief."
    assert store.names() == [ModelName.parse("Tiny")]
    assert model.manifest.size_bytes == len(b"weights") + len(b"Be brief.")


def test_reading_does_not_create_the_store(store) -> None:
    assert store.names() == [] and store.find(NAME) is None
    with pytest.raises(StoreError, match="has no model tiny:latest"):
        store.open(NAME)
    with pytest.raises(StoreError, match="has no model tiny:latest"):
        store.remove(NAME)
    assert store.remove_unused() == 0
    assert not store.root.exists()


@pytest.mark.parametrize("place", ["", "below"])
def test_a_file_in_place_of_the_store_is_an_error(tmp_path, place) -> None:
    (tmp_path / "file").write_text("x")
    store = Store(tmp_path / "file" / place)
    with pytest.raises(StoreError, match="cannot read: Not a directory"):
        store.names()
    with pytest.raises(StoreError, match="cannot read: Not a directory"):
        store.find(ModelName.parse("a"))


@pytest.mark.parametrize("denied", ["", "manifests"])
def test_a_store_that_cannot_be_read_is_an_error(store, monkeypatch, denied) -> None:
    commit(store, "tiny", put(store, b"weights"))
    deny(monkeypatch, store.root / denied)
    for reading in (store.names, store.used, lambda: store.find(NAME), lambda: store.open(NAME)):
        with pytest.raises(StoreError, match="cannot read: Permission denied"):
            reading()


def test_a_folder_that_cannot_be_read_conceals_no_other_models(store, monkeypatch) -> None:
    commit(store, "tiny", put(store, b"weights"))
    commit(store, "mine/other", put(store, b"others"))
    deny(monkeypatch, store.root / "manifests/registry.ollama.ai/library")
    other = ModelName.parse("mine/other")
    assert store.names() == [other] and store.find(other) == other
    for reading in (store.used, store.remove_unused, lambda: store.open(NAME)):
        with pytest.raises(StoreError, match="cannot read: Permission denied"):
            reading()


def test_other_files_among_the_manifests_are_ignored(store) -> None:
    commit(store, "tiny", put(store, b"weights"))
    for place in ("", "registry.ollama.ai", "registry.ollama.ai/library/tiny"):
        (store.root / "manifests" / place / ".note").write_text("mine")
    assert store.names() == [NAME]


def test_names_that_differ_only_in_case_are_one_model(store) -> None:
    commit(store, "Tiny:Q4", put(store, b"old"))
    commit(store, "tiny:q4", put(store, b"new"))
    assert [str(name) for name in store.names()] == ["Tiny:Q4"]
    assert store.open(ModelName.parse("TINY:q4")).files[0].read_bytes() == b"new"


def test_parts_of_a_split_file_are_in_one_folder_under_their_names(store) -> None:
    titles = [f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    layers = [put(store, title.encode(), title=title) for title in titles]
    model = commit(store, "split", *layers)
    assert [path.name for path in model.files] == titles
    assert len({path.parent for path in model.files}) == 1
    assert [path.read_bytes().decode() for path in model.files] == titles
    store.remove(model.name)
    assert list((store.root / "views").rglob("*.gguf")) == []


def test_the_files_of_a_version_are_not_replaced_by_those_of_another(store) -> None:
    """A process may open the parts of a split file while another one pulls a new version."""
    titles = [f"m-0000{n}-of-00002.gguf" for n in (1, 2)]

    def commit_version(version: str):
        layers = [put(store, f"{version} {title}".encode(), title=title) for title in titles]
        return commit(store, "split", *layers)

    one = commit_version("one")
    first = one.files[0].read_bytes()
    two = commit_version("two")
    assert [first, one.files[1].read_bytes()] == [f"one {title}".encode() for title in titles]
    assert [path.name for path in one.files] == [path.name for path in two.files] == titles
    two.files[0].parent.with_name("other.gguf").symlink_to(two.files[0])
    store.remove_unused()
    assert not any(map(os.path.lexists, one.files))
    assert [path.read_bytes() for path in two.files] == [f"two {t}".encode() for t in titles]
    assert store.open(ModelName.parse("split")) == two


def test_a_model_without_the_links_to_its_files_is_incomplete(store) -> None:
    model = commit(store, "split", put(store, b"weights", title="m.gguf"))
    model.files[0].unlink()
    with pytest.raises(StoreError, match="no links to its files; pull the model again"):
        store.open(model.name)
    assert store.commit(model.name, model.manifest) == store.open(model.name)


def test_a_store_may_be_moved(store, tmp_path) -> None:
    commit(store, "tiny", put(store, b"weights", title="tiny.gguf"))
    moved = store.root.rename(tmp_path / "elsewhere")
    assert Store(moved).open(NAME).files[0].read_bytes() == b"weights"


def test_a_blob_with_the_wrong_digest_is_removed(store) -> None:
    entry = layer(b"weights")
    partial = store.partial(entry.digest)
    partial.write_bytes(b"wEights")
    journal_of(partial).write_bytes(b"notes")
    with pytest.raises(SourceError, match="it was removed"):
        store.install_partial(entry)
    assert not store.holds(entry)
    assert list(partial.parent.iterdir()) == []


def test_a_manifest_with_missing_blobs_is_refused(store) -> None:
    with pytest.raises(StoreError, match="is missing"):
        commit(store, "tiny", put(store, b"weights"), layer(b"absent", "system"))
    assert store.names() == []


def test_a_model_with_a_missing_blob_is_an_error(store) -> None:
    entry = put(store, b"weights")
    commit(store, "tiny", entry)
    store.blob(entry.digest).write_bytes(b"weig")
    with pytest.raises(StoreError, match=rf"tiny:latest: blob {entry.digest} is missing"):
        store.open(NAME)


def test_a_hard_linked_blob_outlives_its_origin(store, tmp_path) -> None:
    origin = tmp_path / "origin"
    origin.write_bytes(b"weights")
    store.link(layer(b"weights"), origin)
    store.link(layer(b"weights"), origin)  # again, as another process would
    assert store.blob(digest(b"weights")).samefile(origin)
    origin.unlink()
    assert store.blob(digest(b"weights")).read_bytes() == b"weights"
    assert [path.name for path in (store.root / "blobs").iterdir()] == [
        digest(b"weights").replace(":", "-")
    ]


def test_a_blob_that_cannot_be_hard_linked_is_a_symbolic_link(store, tmp_path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    origin = tmp_path / "origin"
    origin.write_bytes(b"weights")
    store.link(layer(b"weights"), origin)
    assert store.blob(digest(b"weights")).is_symlink() and store.holds(layer(b"weights"))
    origin.unlink()
    assert not store.holds(layer(b"weights"))


def test_a_file_system_without_locks_is_an_error(store, monkeypatch) -> None:
    def fail(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", fail)
    with (
        pytest.raises(StoreError, match="must be on a file system that is writable and supports"),
        store.blob_lock(digest(b"x")),
    ):
        pass


def test_waiting_for_a_lock_is_reported(store, monkeypatch) -> None:
    monkeypatch.setattr("model_zoo.store.locks.POLL_S", 0.02)
    held, said = threading.Event(), threading.Event()

    def hold() -> None:
        with store.blob_lock(digest(b"x")):
            held.set()
            said.wait(HANG_S)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(HANG_S)
    with store.blob_lock(digest(b"x"), waiting=said.set):
        assert said.is_set()
    holder.join()


def test_lack_of_disk_space_is_an_error_before_the_download(store) -> None:
    huge = ManifestLayer(f"{LAYER_TYPE}model", digest(b"huge"), 1 << 49)
    with pytest.raises(StoreError, match=r"bytes free; 562,949,953,421,312 are needed"):
        store.check_space([huge])
    store.check_space([put(store, b"here already")])


def test_received_bytes_do_not_count_as_needed(store, monkeypatch) -> None:
    entry = layer(b"x" * 100_000)
    usage = type("Usage", (), {"free": 50_000 + (64 << 20)})
    monkeypatch.setattr("model_zoo.store.store.shutil.disk_usage", lambda _: usage)
    with pytest.raises(StoreError):
        store.check_space([entry])
    store.partial(entry.digest).write_bytes(b"x" * 80_000)
    store.check_space([entry])


@pytest.mark.parametrize("part", OUTSIDE)
def test_names_cannot_leave_the_store(part) -> None:
    for place in range(4):
        parts = ["host", "namespace", "model", "tag"]
        parts[place] = part
        with pytest.raises(SourceError):
            ModelName(*parts)


@pytest.mark.parametrize("title", OUTSIDE)
def test_titles_of_layers_cannot_leave_the_store(title) -> None:
    assert not is_file_name(title)
    stated = {
        "layers": [
            {
                "mediaType": f"{LAYER_TYPE}model",
                "digest": digest(b""),
                "size": 0,
                "annotations": {"org.opencontainers.image.title": title},
            }
        ]
    }
    with pytest.raises(SourceError, match="invalid manifest"):
        Manifest.parse(json.dumps(stated).encode(), origin="there")


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "sha256:../../etc/passwd"},
        {"digest": "sha256:" + "A" * 64},
        {"digest": "sha512:" + "a" * 128},
        {"size": -1},
        {"size": 1 << 60},
        {"size": 1.5},
        {"mediaType": None},
    ],
)
def test_invalid_layers_are_refused(change) -> None:
    stated = {"mediaType": f"{LAYER_TYPE}model", "digest": digest(b""), "size": 0, **change}
    with pytest.raises(SourceError, match="there: invalid manifest"):
        Manifest.parse(json.dumps({"layers": [stated]}).encode(), origin="there")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"layers": []}',
        b'{"manifests": []}',
        b"\xff\xfe",
        b"[" * 100_000,
        b" " * (5 << 20),
    ],
)
def test_invalid_manifests_are_refused(raw) -> None:
    with pytest.raises(SourceError, match="there: invalid manifest"):
        Manifest.parse(raw, origin="there")


def test_duplicate_titles_in_a_manifest_are_refused() -> None:
    twice = [layer(b"a", title="m.gguf"), layer(b"b", "projector", "m.gguf")]
    with pytest.raises(SourceError, match="same name"):
        Manifest.of(twice, {})


def test_two_sizes_of_one_blob_in_a_manifest_are_refused() -> None:
    """The limit of a text's size would not hold for its blob."""
    text = ManifestLayer(f"{LAYER_TYPE}license", digest(b"weights"), 1)
    with pytest.raises(SourceError, match=f"states two sizes of {text.digest}"):
        Manifest.of([text, layer(b"weights")], {})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("llama3", "llama3:latest"),
        ("llama3:8b", "llama3:8b"),
        ("someone/llama3", "someone/llama3:latest"),
        ("registry.ollama.ai/library/llama3:8b", "llama3:8b"),
        ("localhost:5000/library/x", "localhost:5000/library/x:latest"),
    ],
)
def test_a_name_is_shown_in_its_shortest_form(text, shown) -> None:
    assert str(ModelName.parse(text)) == shown
    assert ModelName.parse(shown) == ModelName.parse(text)


def test_caravan_models_names_the_root() -> None:
    assert str(default_root({"CARAVAN_MODELS": "/data/models"})) == "/data/models"
    assert default_root({}).parts[-2:] == (".caravan", "models")


def test_concurrent_commits_and_removals_leave_a_consistent_store(store) -> None:
    """Each thread has its own locks, like a process."""
    shared = put(store, b"shared")
    commit(store, "kept", shared)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        own = Store(store.root)
        try:
            for round in range(5):
                commit(own, f"m{number}", shared, put(own, f"{number} {round}".encode(), "system"))
                own.remove(ModelName.parse(f"m{number}"))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert [str(name) for name in store.names()] == ["kept:latest"]
    assert store.missing(store.manifest(ModelName.parse("kept"))) == []

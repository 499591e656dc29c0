"""Imports from Ollama's store: its blobs are checked and linked, not copied."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from model_zoo.sources.ollama_store import default_folder, import_models
from model_zoo.sources.resolve import resolve_stored
from runtime.errors import SourceError
from tests.denied_access import deny
from tests.loopback import digest
from tests.published import CONFIG, manifest_of

LAYERS = [
    ("model", b"GGUF weights"),
    ("template", b"{{ .Prompt }}"),
    ("params", b'{"temperature": 0.1}'),
    ("system", b"Be brief."),
]
HOST = "registry.ollama.ai"


def keep(folder: Path, name: str, layers: Sequence[tuple[str, bytes]] = LAYERS) -> Path:
    """Writes a model into a folder in Ollama's layout; `name`: "namespace/model/tag"."""
    manifest = folder / "manifests" / HOST / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps(manifest_of(layers)))
    (folder / "blobs").mkdir(exist_ok=True)
    for data in [CONFIG, *(data for _, data in layers)]:
        blob(folder, data).write_bytes(data)
    return manifest


def blob(folder: Path, data: bytes) -> Path:
    return folder / "blobs" / digest(data).replace(":", "-")


def test_all_models_are_imported_without_a_copy(store, tmp_path) -> None:
    ollama = tmp_path / "ollama"
    keep(ollama, "library/llama3/8b")
    keep(ollama, "someone/other/latest", [("model", b"GGUF other")])
    names = import_models(ollama, store)
    assert [str(name) for name in names] == ["llama3:8b", "someone/other:latest"]
    assert store.names() == names
    model = store.open(names[0])
    assert model.files[0].samefile(blob(ollama, b"GGUF weights"))
    known = resolve_stored(model, store)
    assert (known.system, dict(known.parameters)) == ("Be brief.", {"temperature": 0.1})


def test_a_model_stays_when_ollama_removes_its_own(store, tmp_path) -> None:
    ollama = tmp_path / "ollama"
    keep(ollama, "library/llama3/8b")
    (name,) = import_models(ollama, store)
    for path in ollama.rglob("sha256-*"):
        path.unlink()
    assert store.open(name).files[0].read_bytes() == b"GGUF weights"
    store.remove(name)


def test_removing_an_imported_model_leaves_ollamas_store_complete(store, tmp_path) -> None:
    ollama = tmp_path / "ollama"
    keep(ollama, "library/llama3/8b")
    (name,) = import_models(ollama, store)
    store.remove(name)
    assert blob(ollama, b"GGUF weights").read_bytes() == b"GGUF weights"


def test_models_are_chosen_by_name_in_any_case(store, tmp_path) -> None:
    ollama = tmp_path / "ollama"
    keep(ollama, "library/Llama3/8b")
    keep(ollama, "library/other/latest")
    assert [str(name) for name in import_models(ollama, store, names=["llama3:8B"])] == [
        "Llama3:8b"
    ]
    with pytest.raises(SourceError, match="has no model nothing:latest"):
        import_models(ollama, store, names=["nothing"])


def test_models_that_cannot_be_served_are_skipped_and_reported(store, tmp_path) -> None:
    ollama = tmp_path / "ollama"
    keep(ollama, "library/good/latest")
    keep(ollama, "library/tuned/latest", [("adapter", b"lora")])
    keep(ollama, "library/lost/latest", [("model", b"GGUF lost")])
    blob(ollama, b"GGUF lost").unlink()
    keep(ollama, "library/short/latest", [("model", b"GGUF short")])
    blob(ollama, b"GGUF short").write_bytes(b"GGUF")
    keep(ollama, "library/broken/latest").write_text("{")
    keep(ollama, "library/hostile/latest").write_text(
        json.dumps(manifest_of(LAYERS)).replace(digest(b"GGUF weights"), "sha256:../../x")
    )
    reported = []
    assert [str(name) for name in import_models(ollama, store, progress=reported.append)] == [
        "good:latest"
    ]
    said = "\n".join(progress.status for progress in reported if "skipped" in progress.status)
    assert said.count("is missing or has the wrong size") == 2
    for words in ("has no GGUF model", "lost:latest", "short:latest", "broken", "hostile"):
        assert words in said
    with pytest.raises(SourceError, match="has no GGUF model"):
        import_models(ollama, store, names=["tuned"])


def test_an_unreadable_blob_is_an_error(store, tmp_path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    ollama = tmp_path / "ollama"
    keep(ollama, "library/llama3/8b")
    blob(ollama, b"GGUF weights").chmod(0)
    with pytest.raises(SourceError, match="this user cannot read its blob"):
        import_models(ollama, store, names=["llama3:8b"])


def test_models_whose_blobs_are_in_an_unreadable_folder_are_skipped(
    store, tmp_path, monkeypatch
) -> None:
    ollama = tmp_path / "ollama"
    keep(ollama, "library/llama3/8b")
    deny(monkeypatch, ollama / "blobs")
    reported = []
    assert import_models(ollama, store, progress=reported.append) == []
    assert "this user cannot read its blob" in reported[-1].status


@pytest.mark.parametrize("denied", ["", "manifests", f"manifests/{HOST}/library"])
def test_an_unreadable_folder_is_an_error_with_the_way_to_get_access(
    store, tmp_path, monkeypatch, denied
) -> None:
    ollama = tmp_path / "ollama"
    keep(ollama, "library/llama3/8b")
    deny(monkeypatch, ollama / denied)
    with pytest.raises(SourceError, match=r"ollama: this user cannot read it\. .*usermod -aG"):
        import_models(ollama, store)


def test_a_folder_that_is_no_store_is_an_error(store, tmp_path) -> None:
    with pytest.raises(SourceError, match="not a store of Ollama"):
        import_models(tmp_path / "nowhere", store)


def test_ollama_models_names_the_folder() -> None:
    assert default_folder({"OLLAMA_MODELS": "/data/ollama"}) == Path("/data/ollama")
    assert default_folder({}).parts[-2:] == (".ollama", "models")

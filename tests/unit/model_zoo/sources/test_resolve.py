"""Sources of configurations resolve to files and to the content of a model's layers."""

import pytest

from model_zoo.chat.messages import Message
from model_zoo.sources.pull import pull
from model_zoo.sources.reference import parse_source
from model_zoo.sources.resolve import resolve, resolve_stored
from model_zoo.store import manifest
from model_zoo.store.store import Store
from runtime.errors import SourceError, StoreError
from tests.loopback import Server, digest, serving
from tests.published import Registry

LAYERS = [
    ("model", b"GGUF weights"),
    ("projector", b"GGUF projector"),
    ("template", b"{{ .Prompt }}"),
    ("params", b'{"num_ctx": 4096, "stop": ["<end>"]}'),
    ("system", b"overruled"),
    ("system", b"Be brief."),
    ("messages", b'[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]'),
    ("license", b"MIT"),
    ("license", b"And more."),
]


def publishing(layers=LAYERS) -> Registry:
    registry = Registry()
    registry.publish("library/m:latest", layers)
    return registry


def source(server: Server) -> str:
    return f"ollama://{server.host}/library/m"


def test_a_path_resolves_to_itself(store) -> None:
    found = resolve("models/demo.gguf", store)
    assert (str(found.path), found.projector, found.stored) == ("models/demo.gguf", None, None)
    assert (found.system, dict(found.parameters), found.messages) == (None, {}, ())
    assert not store.root.exists()


def test_a_pulled_model_resolves_without_its_registry(store) -> None:
    reported = []
    with serving(publishing()) as server:
        first = resolve(source(server), store, progress=reported.append)
    assert reported[-1].status == "success"
    assert resolve(source(server), store, progress=lambda _: pytest.fail("pulls again")) == first
    assert first.path.read_bytes() == b"GGUF weights"
    assert first.projector is not None and first.projector.read_bytes() == b"GGUF projector"
    assert first.template == "{{ .Prompt }}"
    assert first.parameters == {"num_ctx": 4096, "stop": ["<end>"]}
    assert first.system == "Be brief."
    assert first.messages == (Message("user", "hi"), Message("assistant", "ho"))
    assert first.license == "MIT\nAnd more."


def test_a_missing_blob_is_pulled_again(store) -> None:
    with serving(publishing()) as server:
        found = resolve(source(server), store)
        store.blob(digest(b"Be brief.")).unlink()
        sent = server.sent("/blobs/")
        assert resolve(source(server), store) == found
        assert server.sent("/blobs/") == sent + len(b"Be brief.")


def test_a_damaged_manifest_is_pulled_again(store) -> None:
    with serving(publishing()) as server:
        found = resolve(source(server), store)
        (path,) = (path for path in store.root.rglob("manifests/*/*/*/*") if path.is_file())
        path.write_text("{")
        assert resolve(source(server), store) == found


def test_absent_layers_resolve_to_nothing(store) -> None:
    with serving(publishing([("model", b"GGUF")])) as server:
        found = resolve(source(server), store)
    assert (found.projector, found.template, found.system, found.license) == (None,) * 4


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("params", b"{"),
        ("params", b"[]"),
        ("params", b"[" * 100_000),
        ("messages", b"{}"),
        ("messages", b'[{"content": 5}]'),
    ],
)
def test_an_invalid_layer_is_an_error_with_its_name(store, kind, data) -> None:
    refused = pytest.raises(StoreError, match=f"m:latest: its layer {kind} is invalid")
    with serving(publishing([("model", b"GGUF"), (kind, data)])) as server, refused:
        resolve(source(server), store)


def test_a_text_of_several_layers_is_read_once(store, monkeypatch) -> None:
    """A small manifest may name one large blob in each of a thousand layers."""
    layers = [("model", b"GGUF"), *5 * [("license", b"MIT")], ("license", b"And more.")]
    with serving(
        publishing([*layers, ("system", b"overruled"), ("system", b"Be brief.")])
    ) as server:
        pull(parse_source(source(server)), store)
        read = []
        text = Store.text
        monkeypatch.setattr(
            Store, "text", lambda self, layer: (read.append(layer.digest), text(self, layer))[1]
        )
        found = resolve(source(server), store)
    assert (found.license, found.system) == ("MIT\nAnd more.", "Be brief.")
    assert read.count(digest(b"MIT")) == 1 and digest(b"overruled") not in read


def test_texts_share_one_limit(store, monkeypatch) -> None:
    licenses = [("license", bytes([65 + number]) * 30) for number in range(3)]
    monkeypatch.setattr(manifest, "MAX_TEXT_BYTES", 89)
    with serving(publishing([("model", b"GGUF"), *licenses, licenses[0]])) as server:
        with pytest.raises(SourceError, match="have 90 bytes; the limit is 89"):
            resolve(source(server), store)
        assert not server.sent("/blobs/")  # refused before the download
        monkeypatch.setattr(manifest, "MAX_TEXT_BYTES", 90)
        stored = resolve(source(server), store).stored
    monkeypatch.setattr(manifest, "MAX_TEXT_BYTES", 89)
    with pytest.raises(SourceError, match="have 90 bytes"):  # of an older version, or by hand
        resolve_stored(stored, store)


def test_invalid_sources_are_refused(store) -> None:
    with pytest.raises(SourceError):
        resolve("s3://bucket/x", store)

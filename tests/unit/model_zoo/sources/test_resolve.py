"""Sources of configurations resolve to files and to the content of a model's layers."""

import pytest

from model_zoo.chat.messages import Message
from model_zoo.sources.resolve import resolve
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
        (manifest,) = (path for path in store.root.rglob("manifests/*/*/*/*") if path.is_file())
        manifest.write_text("{")
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


def test_invalid_sources_are_refused(store) -> None:
    with pytest.raises(SourceError):
        resolve("s3://bucket/x", store)

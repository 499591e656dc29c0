"""Models created from others and from files."""

import hashlib
import json
import os
from pathlib import Path

import gguf
import pytest

from model_zoo.chat.messages import Message
from model_zoo.gguf.reader import GGUFFile
from model_zoo.sources.push import CONFIG_TYPE
from model_zoo.sources.reference import RegistrySource
from model_zoo.sources.resolve import resolve_stored
from model_zoo.store.creation import copy, create, file_kind
from model_zoo.store.definition import Definition
from model_zoo.store.importing import import_file
from model_zoo.store.manifest import LAYER_TYPE, Manifest, ManifestLayer
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.errors import RequestError, SourceError, StoreError
from tests.gguf_files import finish
from tests.loopback import serving
from tests.published import Registry
from tests.tiny_models import write_tiny_llama
from tests.unit.model_zoo.gguf.test_split import split_like_a_converter
from tests.unit.serve_app.cli.cli_runs import put

NEW = ModelName.parse("mine")
BASE = RegistrySource(ModelName.parse("tiny"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_llama(path, type="F16")
    return path


@pytest.fixture
def based(tiny, store) -> Store:
    blobs = {
        "model": tiny.read_bytes(),
        "template": b"{{ .Prompt }}",
        "system": b"Be brief.",
        "params": b'{"temperature": 0.25, "stop": ["<end>"]}',
        "messages": b'[{"role": "user", "content": "before"}]',
        "license": b"MIT",
    }
    put(store, "tiny", blobs)
    return store


def made(store: Store, **change):
    return resolve_stored(create(NEW, Definition(**change), store), store)


def uploaded(store: Store, path: Path) -> str:
    return import_file(path, store).digest


def test_a_model_inherits_from_its_base(based):
    base, model = (
        resolve_stored(based.open(BASE.name), based),
        made(
            based,
            base=BASE,
            parameters={"temperature": 1, "top_k": 3},
            system="Be long.",
            template="{{ messages[0].content }}",
            messages=(Message("user", "hi"), Message("assistant", "ho")),
            licenses=("mine",),
        ),
    )
    assert model.path == base.path
    assert model.parameters == {"temperature": 1, "top_k": 3, "stop": ["<end>"]}
    assert (model.system, model.template) == ("Be long.", "{{ messages[0].content }}")
    assert [(m.role, m.text) for m in model.messages] == [("user", "hi"), ("assistant", "ho")]
    assert model.license == "MIT\nmine"
    assert resolve_stored(based.open(BASE.name), based) == base


def test_absent_texts_are_inherited_and_empty_ones_remove(based):
    base = resolve_stored(based.open(BASE.name), based)
    assert made(based, base=BASE).parameters == base.parameters
    model = made(based, base=BASE, system="", template="", messages=())
    assert (model.system, model.template, model.messages) == (None, None, ())
    assert model.parameters == base.parameters


def test_a_model_can_be_recreated_from_itself(based):
    own = RegistrySource(NEW)
    made(based, base=BASE, system="one")
    assert made(based, base=own, parameters={"top_k": 1}).system == "one"


def test_creation_reports_its_steps(based):
    reported = []
    create(NEW, Definition(base=BASE, system="x"), based, progress=reported.append)
    digest = hashlib.sha256(b"x").hexdigest()
    statuses = [step.status for step in reported]
    assert statuses == [f"creating new layer sha256:{digest}", "writing manifest", "success"]
    reported.clear()
    create(NEW, Definition(base=BASE, system="x"), based, progress=reported.append)
    assert reported[0].status == f"using existing layer sha256:{digest}"


def test_a_base_that_the_store_lacks_is_pulled(tiny, store, monkeypatch):
    published = Registry()
    published.publish("library/tiny:latest", [("model", tiny.read_bytes())])
    with serving(published) as server:
        base = RegistrySource(ModelName.parse(f"{server.host}/library/tiny"))
        reported = []
        definition = Definition(base=base, system="x")
        model = create(NEW, definition, store, progress=reported.append, environment=os.environ)
    assert resolve_stored(model, store).system == "x"
    assert [step.status for step in reported].count("success") == 1


def test_a_file_becomes_a_model_without_a_link_to_it(tiny, store, tmp_path):
    path = tmp_path / "own.gguf"
    path.write_bytes(tiny.read_bytes())
    model = made(store, files={"own.gguf": uploaded(store, path)})
    path.write_bytes(b"something else")
    assert model.path.read_bytes() == tiny.read_bytes()


def test_a_split_model_keeps_the_names_of_its_parts(tiny, store, tmp_path):
    first = split_like_a_converter(tiny, tmp_path, tensors_each=10)
    parts = sorted(tmp_path.glob("*-of-*.gguf"))
    digests = {part.name: uploaded(store, part) for part in parts}
    model = made(store, files=digests)
    assert model.path.name == first.name and len(parts) > 1
    assert set(GGUFFile.open(model.path).tensors) == set(GGUFFile.open(tiny).tensors)
    digests.popitem()
    with pytest.raises(RequestError, match="there is no such file") as caught:
        made(store, files=digests)
    assert "creating-" not in str(caught.value)


def projector(path: Path, **fields: object) -> Path:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    for name, value in fields.items():
        writer.add_string(f"general.{name}", str(value))
    finish(writer)
    return path


def test_a_projector_file_is_recognised(tiny, store, tmp_path):
    vision = projector(tmp_path / "mmproj.gguf")
    files = {"m.gguf": uploaded(store, tiny), "e.gguf": uploaded(store, vision)}
    model = made(store, files=files)
    assert model.projector is not None and model.projector.read_bytes() == vision.read_bytes()
    assert (file_kind(tiny), file_kind(vision)) == ("model", "projector")


def test_weights_are_quantised_on_request(tiny, store):
    model = made(store, files={"m.gguf": uploaded(store, tiny)}, quantize="q8_0")
    types = {info.type.name for info in GGUFFile.open(model.path).tensors.values()}
    assert "Q8_0" in types and model.path.stat().st_size < tiny.stat().st_size
    assert not list(store.root.glob(".creating*"))
    with pytest.raises(RequestError, match="quantised already"):
        made(store, base=RegistrySource(NEW), quantize="q4_0")


def test_a_quantised_model_has_not_the_config_of_its_base(tiny, store):
    """It states the type of the base's weights; a push writes a new one."""
    data = b'{"file_type": "F16"}'
    config = ManifestLayer(CONFIG_TYPE, f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))
    store.partial(config.digest).write_bytes(data)
    store.install_partial(config)
    size = tiny.stat().st_size
    layers = [ManifestLayer(f"{LAYER_TYPE}model", uploaded(store, tiny), size)]
    store.commit(BASE.name, Manifest.of(layers, {}, config=config))
    for recipe, expected in ((None, config), ("q8_0", None)):
        create(NEW, Definition(base=BASE, quantize=recipe), store)
        assert store.manifest(NEW).config == expected


def test_the_digest_of_quantised_weights_is_computed_once_with_progress(tiny, store, monkeypatch):
    steps = []
    files = {"m.gguf": uploaded(store, tiny)}
    monkeypatch.setattr("model_zoo.store.store.digest_of", None)
    create(NEW, Definition(files=files, quantize="q8_0"), store, progress=steps.append)
    size = store.manifest(NEW).size_bytes
    assert any(step.total == size and step.completed == size for step in steps)


REFUSED = [
    (lambda store, tiny, tmp: {"m.gguf": "sha256:" + "0" * 64}, "upload it first"),
    (lambda store, tiny, tmp: {"m.gguf": "sha256:../../etc/passwd"}, "is not a digest"),
    (lambda store, tiny, tmp: {"../m.gguf": uploaded(store, tiny)}, "is not a valid file name"),
    (lambda store, tiny, tmp: {"m": uploaded(store, Path(__file__))}, "file m: "),
    (lambda store, tiny, tmp: two_models(store, tiny, tmp), "2 of the files are models"),
    (
        lambda store, tiny, tmp: {"e": uploaded(store, projector(tmp / "e.gguf"))},
        "the files contain no model",
    ),
    (
        lambda store, tiny, tmp: {
            "m": uploaded(store, tiny),
            "a": uploaded(store, projector(tmp / "a.gguf", type="adapter")),
        },
        "adapter: sha256-.*`adapter.type` is missing",
    ),
]


def two_models(store: Store, tiny: Path, folder: Path) -> dict[str, str]:
    write_tiny_llama(folder / "other.gguf", type="Q8_0")
    return {"a.gguf": uploaded(store, tiny), "b.gguf": uploaded(store, folder / "other.gguf")}


@pytest.mark.parametrize(("files", "reported"), REFUSED, ids=[reported for _, reported in REFUSED])
def test_files_without_a_servable_model_are_refused(tiny, store, tmp_path, files, reported):
    with pytest.raises((RequestError, SourceError), match=reported):
        made(store, files=files(store, tiny, tmp_path))
    assert store.find(NEW) is None


def test_a_copy_is_the_same_under_another_name(based):
    copied = copy(BASE.name, ModelName.parse("me/copy:7b"), based)
    assert copied.manifest.digest == based.open(BASE.name).manifest.digest
    based.remove(BASE.name)
    assert resolve_stored(based.open(copied.name), based).system == "Be brief."
    with pytest.raises(StoreError, match="has no model tiny:latest"):
        copy(BASE.name, NEW, based)


def test_a_file_that_changes_during_the_copy_is_refused(tiny, store, tmp_path):
    path = tmp_path / "own.gguf"
    path.write_bytes(tiny.read_bytes())
    with pytest.raises(SourceError, match="file changed during"):
        import_file(path, store, progress=lambda step: path.write_bytes(b"x" * 10))
    layer = ManifestLayer("", f"sha256:{hashlib.sha256(tiny.read_bytes()).hexdigest()}", 1)
    assert not store.blob(layer.digest).exists()


def test_invalid_parameters_of_a_base_are_an_error(tiny, store):
    put(store, "tiny", {"model": tiny.read_bytes(), "params": json.dumps([1]).encode()})
    with pytest.raises(StoreError, match="params is invalid"):
        made(store, base=BASE, parameters={"top_k": 1})

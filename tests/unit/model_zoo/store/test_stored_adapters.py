"""Adapters of stored models: created, inherited, replaced, copied and removed with their models."""

from pathlib import Path

import pytest

from model_zoo.gguf.adapter_path import MAX_ADAPTERS
from model_zoo.sources.reference import PathSource, RegistrySource
from model_zoo.sources.resolve import resolve_stored
from model_zoo.store.creation import copy, create
from model_zoo.store.definition import ChosenAdapter, Definition
from model_zoo.store.importing import import_file
from model_zoo.store.manifest import ADAPTER_SCALE, Manifest
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.errors import RequestError, SourceError
from tests.adapter_files import random_pairs, write_adapter
from tests.tiny_models import write_tiny_llama

NAMES = {name: ModelName.parse(name) for name in ("base", "one", "two", "copy")}
BASE, ONE = RegistrySource(NAMES["base"]), RegistrySource(NAMES["one"])


def adapter(path: Path, *, seed: int = 0, **change) -> Path:
    pairs = random_pairs({"blk.0.attn_q.weight": (64, 64)}, 4, seed=seed)
    return write_adapter(path, pairs, **change)


@pytest.fixture
def store(tmp_path) -> Store:
    store = Store(tmp_path / "store")
    write_tiny_llama(tmp_path / "tiny.gguf")
    digest = import_file(tmp_path / "tiny.gguf", store).digest
    create(NAMES["base"], Definition(files={"tiny.gguf": digest}), store)
    return store


def made(store: Store, name: str, *adapters: ChosenAdapter, base=BASE):
    definition = Definition(base=base, adapters=adapters or None)
    return create(NAMES[name], definition, store)


def used(store: Store, name: str) -> list[tuple[bytes, float]]:
    model = resolve_stored(store.open(NAMES[name]), store)
    return [(each.path.read_bytes(), each.scale) for each in model.adapters]


def uploaded(store: Store, path: Path) -> str:
    return import_file(path, store).digest


def test_models_with_adapters_share_the_blob_of_their_base(store, tmp_path) -> None:
    files = [adapter(tmp_path / f"{n}.gguf", seed=n) for n in range(2)]
    made(store, "one", ChosenAdapter(uploaded(store, files[0])))
    made(store, "two", *(ChosenAdapter(PathSource(file), 0.5) for file in files))
    assert used(store, "one") == [(files[0].read_bytes(), 1.0)]
    assert used(store, "two") == [(file.read_bytes(), 0.5) for file in files]
    assert len({store.open(NAMES[name]).files for name in ("base", "one", "two")}) == 1


def test_a_model_inherits_the_adapters_of_its_base_or_replaces_them(store, tmp_path) -> None:
    files = [adapter(tmp_path / f"{n}.gguf", seed=n) for n in range(2)]
    made(store, "one", ChosenAdapter(PathSource(files[0]), -2.0))
    made(store, "two", base=ONE)
    assert used(store, "two") == [(files[0].read_bytes(), -2.0)]
    made(store, "two", ChosenAdapter(PathSource(files[1])), base=ONE)
    assert used(store, "two") == [(files[1].read_bytes(), 1.0)]
    create(NAMES["two"], Definition(base=ONE, adapters=()), store)
    assert used(store, "two") == []


def test_an_adapter_among_the_files_is_one_of_the_model(store, tmp_path) -> None:
    path = adapter(tmp_path / "a.gguf")
    files = {"tiny.gguf": uploaded(store, tmp_path / "tiny.gguf"), "a.gguf": uploaded(store, path)}
    create(NAMES["one"], Definition(files=files), store)
    assert used(store, "one") == [(path.read_bytes(), 1.0)]


def test_the_blob_of_an_adapter_is_removed_with_its_last_model(store, tmp_path) -> None:
    made(store, "one", ChosenAdapter(PathSource(adapter(tmp_path / "a.gguf"))))
    copy(NAMES["one"], NAMES["copy"], store)
    (found,) = store.open(NAMES["copy"]).adapters
    store.remove(NAMES["one"])
    store.remove_unused(older_than_s=-1)
    assert used(store, "copy") and found.path.exists()
    store.remove(NAMES["copy"])
    assert not found.path.exists() and store.open(NAMES["base"]).files[0].exists()


def test_unsuitable_adapters_are_refused_without_the_path_of_the_store(store, tmp_path) -> None:
    foreign = uploaded(store, adapter(tmp_path / "q.gguf", architecture="qwen2"))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(adapter(tmp_path / "a.gguf").read_bytes()[:100])
    wrong = {"v.blk.0.attn_q.weight": (64, 64)}, {"blk.0.attn_q.weight": (64, 32)}
    unused, misshapen = (
        uploaded(store, write_adapter(tmp_path / f"{n}.gguf", random_pairs(shapes, 4)))
        for n, shapes in enumerate(wrong)
    )
    cases = [
        ([unused], r"adapter: sha256-\w+: .* that the model lacks .*\(v\.blk\.0\.attn_q\.weight\)"),
        ([misshapen], r"adapter: sha256-\w+: .*\(blk\.0\.attn_q\.weight is 64 x 64, not 64 x 32"),
        ([foreign], "for models of architecture qwen2"),
        ([uploaded(store, damaged)], "adapter: sha256-"),
        ([uploaded(store, tmp_path / "tiny.gguf")], "that of a LoRA adapter is adapter"),
        (["sha256:" + "0" * 64], "upload it first"),
        ([foreign] * (MAX_ADAPTERS + 1), f"the limit is {MAX_ADAPTERS}"),
    ]
    for digests, reported in cases:
        with pytest.raises(RequestError, match=reported) as caught:
            made(store, "one", *map(ChosenAdapter, digests))
        assert str(store.root) not in str(caught.value)
        assert store.find(NAMES["one"]) is None


@pytest.mark.parametrize("scale", ["nan", "inf", "1e999", "x", ""])
def test_a_manifest_with_an_invalid_scale_is_refused(store, tmp_path, scale) -> None:
    model = made(store, "one", ChosenAdapter(PathSource(adapter(tmp_path / "a.gguf")), 0.5))
    stated = f'"{ADAPTER_SCALE}":"0.5"'.encode()
    assert stated in model.manifest.raw
    raw = model.manifest.raw.replace(stated, stated.replace(b"0.5", scale.encode()))
    with pytest.raises(SourceError, match="is not a finite number"):
        Manifest.parse(raw, origin="a registry")

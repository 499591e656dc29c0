"""Blobs and models for tests of the store."""

from model_zoo.store.manifest import LAYER_TYPE, Manifest, ManifestLayer
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from tests.loopback import digest


def layer(data: bytes, kind: str = "model", title: str | None = None) -> ManifestLayer:
    return ManifestLayer(f"{LAYER_TYPE}{kind}", digest(data), len(data), title)


def put(store: Store, data: bytes, kind: str = "model", title: str | None = None) -> ManifestLayer:
    entry = layer(data, kind, title)
    with store.blob_lock(entry.digest):
        store.partial(entry.digest).write_bytes(data)
        store.install_partial(entry)
    return entry


def commit(store: Store, name: str, *layers: ManifestLayer):
    return store.commit(ModelName.parse(name), Manifest.of(layers, {}))

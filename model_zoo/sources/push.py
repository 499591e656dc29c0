"""Pushes a model of the store to a registry."""

import io
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from hashlib import sha256
from typing import BinaryIO

import msgspec

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.model_headers import ModelHeaders
from model_zoo.sources.http import Http, StatusError
from model_zoo.sources.oci_registry import MANIFEST_TYPES, Repository
from model_zoo.sources.pull import Progress, PullProgress, ignore_progress, open_http
from model_zoo.sources.upload import is_present, refused, upload
from model_zoo.store.manifest import MANIFEST_TYPE, Manifest, ManifestLayer
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store, StoredModel

CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
CHUNK_BYTES = 64 << 20

OpenContent = Callable[[], BinaryIO]


def push(
    name: ModelName,
    store: Store,
    *,
    progress: Progress | None = None,
    environment: Mapping[str, str] = os.environ,
    insecure: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    first_pause_s: float = 0.5,
) -> None:
    """Pushes the model to the registry in its name; only blobs that the registry lacks are sent.

    `progress` is called in the caller's thread; an exception that it raises ends the push.
    `insecure`: treats the registry as the `insecure_host` of `open_http`. StoreError if the store
    lacks the model or a part of it, SourceError if the registry refuses it or is not available.
    """
    report = progress or ignore_progress
    report(PullProgress("retrieving manifest"))
    manifest, contents = _contents(store.open(name), store)
    host = name.host if insecure else None
    with closing(open_http(environment, host, report, first_pause_s=first_pause_s)) as http:
        repository = Repository.of(name, http)
        for layer in manifest.blobs:
            _push_blob(layer, contents[layer.digest], repository, http, report, chunk_bytes)
        report(PullProgress("pushing manifest"))
        _push_manifest(manifest, repository, http)
    report(PullProgress("success"))


def _contents(model: StoredModel, store: Store) -> tuple[Manifest, dict[str, OpenContent]]:
    """The manifest, and its blobs by digest. A manifest without a config, which registries require,
    gets one."""
    contents: dict[str, OpenContent] = {
        layer.digest: partial(store.open_blob, layer.digest) for layer in model.manifest.blobs
    }
    if model.manifest.config is not None:
        return model.manifest, contents
    data = _config(model)
    config = ManifestLayer(CONFIG_TYPE, f"sha256:{sha256(data).hexdigest()}", len(data))
    manifest = Manifest.of(model.manifest.layers, model.manifest.annotations, config=config)
    return manifest, {**contents, config.digest: partial(io.BytesIO, data)}


def _config(model: StoredModel) -> bytes:
    """A config with the facts that Ollama's lists show without reading a model's files."""
    path = model.files[0]
    file = ModelHeaders.open(path)
    metadata = Metadata(file.metadata, path=path)
    return msgspec.json.encode(
        {
            "model_format": "gguf",
            "model_family": metadata.architecture,
            "model_families": [metadata.architecture],
            "file_type": file.quantization(metadata),
            "architecture": "amd64",
            "os": "linux",
            "rootfs": {
                "type": "layers",
                "diff_ids": [layer.digest for layer in model.manifest.layers],
            },
        }
    )


def _push_blob(
    layer: ManifestLayer,
    open_content: OpenContent,
    repository: Repository,
    http: Http,
    report: Progress,
    chunk_bytes: int,
) -> None:
    status = f"pushing {layer.digest.removeprefix('sha256:')[:12]}"

    def completed(nbytes: int) -> None:
        report(PullProgress(status, layer.digest, layer.size, nbytes))

    completed(0)
    retrying = http.retrying(repository.pages.host)
    if not retrying(is_present, layer.digest, repository, http):
        with open_content() as content:
            upload(layer, content, repository, http, report=completed, chunk_bytes=chunk_bytes)
    completed(layer.size)


def _push_manifest(manifest: Manifest, repository: Repository, http: Http) -> None:
    stated = manifest.media_type
    headers = {
        "content-type": stated if stated in MANIFEST_TYPES else MANIFEST_TYPE,
        "content-length": str(len(manifest.raw)),
    }
    sending = partial(
        http.send,
        "PUT",
        repository.manifest,
        accepted=(200, 201, 202),
        content=lambda: iter([manifest.raw]),
        headers=headers,
        credentials=repository.token,
    )
    try:
        http.retrying(repository.pages.host)(sending)
    except StatusError as refusal:
        raise refused(repository.manifest, "the manifest", refusal) from None

"""Runs the command line for tests, and stores small models."""

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from click.testing import CliRunner, Result

from model_zoo.store.manifest import LAYER_TYPE, Manifest, ManifestLayer
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from serve_app.cli.main import caravan

# The script that an installation creates, or its equivalent.
SCRIPT = Path(sys.executable).with_name("caravan")
CARAVAN = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "serve_app.cli"]


def run(
    *arguments: object, status: int = 0, store: Store | None = None, piped: str | None = None
) -> Result:
    """The result of `caravan ARGUMENTS`; its exit status must be `status`. `piped`: its standard
    input."""
    environment = {"CARAVAN_MODELS": str(store.root)} if store else {}
    words = [str(word) for word in arguments]
    result = CliRunner(env=environment).invoke(caravan, words, input=piped)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


def said(*arguments: object, **options: Any) -> Any:
    """The JSON document that a command wrote."""
    return json.loads(run(*arguments, "--json", **options).stdout)


def put(
    store: Store,
    name: str,
    blobs: Mapping[str, bytes],
    annotations: Mapping[str, str] = MappingProxyType({}),
) -> Manifest:
    """Store a model made of these blobs, by kind ("model", "license", ...)."""
    layers = []
    for kind, content in blobs.items():
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        layers.append(ManifestLayer(LAYER_TYPE + kind, digest, len(content)))
        store.partial(digest).write_bytes(content)
        store.install_partial(layers[-1])
    manifest = Manifest.of(layers, annotations)
    store.commit(ModelName.parse(name), manifest)
    return manifest


def blob(store: Store, manifest: Manifest, kind: str = "model") -> Path:
    (layer,) = manifest.of_kind(kind)
    return store.blob(layer.digest)

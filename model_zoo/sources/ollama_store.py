"""Imports models from Ollama's store on this machine without copying their files."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from model_zoo.sources.pull import Progress, PullProgress, ignore_progress
from model_zoo.store.file_access import manifest_paths
from model_zoo.store.manifest import MAX_MANIFEST_BYTES, Manifest, ManifestLayer
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.errors import SourceError, StoreError
from runtime.home_directory import expanded


def default_folder(environment: Mapping[str, str]) -> Path:
    """`$OLLAMA_MODELS`, or else ~/.ollama/models."""
    return expanded(environment.get("OLLAMA_MODELS") or "~/.ollama/models")


def import_models(
    folder: Path, store: Store, *, names: Sequence[str] = (), progress: Progress | None = None
) -> list[ModelName]:
    """Imports the named models, or all; each blob becomes a hard link if possible, else a symbolic
    link.

    SourceError if the folder cannot be read or is no store, and for a name that does not exist or
    cannot be served. Without names, models that cannot be served are skipped and reported to
    `progress`.
    """
    report = progress or ignore_progress
    manifests = dict(_manifests(folder))
    if names:
        chosen = [_stored_name(ModelName.parse(name), manifests, folder) for name in names]
        return [_import(name, manifests[name], folder, store, report) for name in chosen]
    imported = []
    for name, path in manifests.items():
        try:
            imported.append(_import(name, path, folder, store, report))
        except SourceError as error:
            report(PullProgress(f"skipped: {error}"))
    return imported


def _manifests(folder: Path) -> Iterator[tuple[ModelName, Path]]:
    root = folder / "manifests"
    try:
        paths = [path for path in manifest_paths(root) if path.is_file()]
        if not paths and not root.is_dir():
            raise SourceError(f"{folder} is not a store of Ollama: it has no folder `manifests`.")
    except (OSError, StoreError) as error:
        raise SourceError(
            f"{folder}: this user cannot read it. Join the group of its owner (for Ollama "
            "`sudo usermod -aG ollama $USER`) and log in again, or import as another user."
        ) from error
    for path in paths:
        with suppress(SourceError):
            yield ModelName(*path.relative_to(root).parts), path


def _stored_name(name: ModelName, manifests: Mapping[ModelName, Path], folder: Path) -> ModelName:
    wanted = [part.lower() for part in name.parts]
    for known in manifests:
        if [part.lower() for part in known.parts] == wanted:
            return known
    raise SourceError(f"{folder} has no model {name}.")


def _import(name: ModelName, path: Path, folder: Path, store: Store, report: Progress) -> ModelName:
    report(PullProgress(f"importing {name}"))
    try:
        with path.open("rb") as file:
            manifest = Manifest.parse(file.read(MAX_MANIFEST_BYTES + 1), origin=str(path))
    except OSError as error:
        raise SourceError(f"{path}: cannot read: {error.strerror}.") from error
    manifest.check_servable(name)
    for layer in manifest.blobs:
        _link(name, layer, folder, store)
    return store.commit(name, manifest).name


def _link(name: ModelName, layer: ManifestLayer, folder: Path, store: Store) -> None:
    origin = folder / "blobs" / layer.digest.replace(":", "-")
    with store.blob_lock(layer.digest):
        if store.holds(layer):
            return
        try:
            complete = origin.is_file() and origin.stat().st_size == layer.size
            readable = os.access(origin, os.R_OK)
        except PermissionError:  # of its folder
            complete, readable = True, False
        if not complete:
            raise SourceError(f"{name}: its blob {origin} is missing or has the wrong size.")
        if not readable:
            raise SourceError(f"{name}: this user cannot read its blob {origin}.")
        store.link(layer, origin)

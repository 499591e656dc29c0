"""Creates models: a manifest of the layers of another model or of GGUF files, with changes."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

from model_zoo.convert.quantize import quantize_file
from model_zoo.gguf.adapter_path import MAX_ADAPTERS, AdapterPath
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.model_headers import FilePart, ModelHeaders
from model_zoo.gguf.split import further_parts
from model_zoo.gguf.tensors import META
from model_zoo.registry import LoadOptions, load, open_adapters
from model_zoo.sources.pull import Progress, PullProgress, ignore_progress, placeholder_digest, pull
from model_zoo.sources.reference import PathSource, RemoteSource, Source
from model_zoo.sources.resolve import stored_model
from model_zoo.store.definition import ChosenAdapter, Definition
from model_zoo.store.file_access import file_error
from model_zoo.store.importing import import_file
from model_zoo.store.manifest import LAYER_TYPE, Manifest, ManifestLayer, check_digest, is_file_name
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store, StoredModel
from runtime.errors import CaravanError, ModelFileError, RequestError, StoreError

# Another process may remove a blob between its creation and the commit of the manifest.
MAX_COMMITS = 3
_TEXTS = ("template", "system")
_FILES = ("model", "projector", "adapter")  # the kinds of layers that are GGUF files


def create(
    name: ModelName,
    definition: Definition,
    store: Store,
    *,
    progress: Progress | None = None,
    environment: Mapping[str, str] = os.environ,
) -> StoredModel:
    """Creates the model in the store; pulls a base that the store lacks.

    RequestError if files are not GGUF or do not fit together; SourceError and StoreError as in
    `pull`.
    """
    report = progress or ignore_progress
    for left in reversed(range(MAX_COMMITS)):
        layers, config, annotations = _base_layers(definition, store, report, environment)
        _check_adapters(layers, store)
        if definition.quantize is not None:
            layers = _quantized(layers, definition.quantize, store, report)
            config = None  # it states the former type of the weights; a push writes a new one
        layers = _with_changes(layers, definition, store, report)
        manifest = Manifest.of(layers, annotations, config=config)
        manifest.check_servable(name)
        report(PullProgress("writing manifest"))
        try:
            stored = store.commit(name, manifest)
            break
        except StoreError:
            if not left or not store.missing(manifest):
                raise
    report(PullProgress("success"))
    return stored


def copy(source: ModelName, destination: ModelName, store: Store) -> StoredModel:
    """Gives the model a second name, without copying files. StoreError if there is no `source`."""
    return store.commit(destination, store.manifest(source))


def file_kind(path: Path) -> str:
    """Returns "model", "projector" or "adapter". ModelFileError if it is not a GGUF file."""
    metadata = _metadata(path)
    architecture = metadata.get("general.architecture")
    kind = metadata.get("general.type")
    if kind == "adapter":
        return "adapter"
    blocks = metadata.get(f"{architecture}.block_count")
    vision_blocks = metadata.get(f"{architecture}.vision.block_count")
    is_projector = architecture == "clip" or kind == "mmproj" or (blocks == 0 and vision_blocks)
    return "projector" if is_projector else "model"


def _base_layers(
    definition: Definition,
    store: Store,
    report: Progress,
    environment: Mapping[str, str],
) -> tuple[list[ManifestLayer], ManifestLayer | None, Mapping[str, str]]:
    """The layers of the base, with the config and annotations of its manifest."""
    base = definition.base
    if isinstance(base, RemoteSource):
        found = _remote(base, store, report, environment).manifest
        layers, config, annotations = list(found.layers), found.config, found.annotations
    else:
        files = definition.files if base is None else _imported(base, store, report)
        report(PullProgress("parsing GGUF"))
        layers, config, annotations = _file_layers(files, store), None, {}
    if definition.projector is not None:
        file = _file_of(definition.projector, store, report, environment)
        projector = ManifestLayer(f"{LAYER_TYPE}projector", file.digest, file.size)
        layers = [*(layer for layer in layers if layer.kind != "projector"), projector]
    if definition.adapters is not None:
        adapters = [
            _adapter_layer(each, store, report, environment) for each in definition.adapters
        ]
        layers = [*(layer for layer in layers if layer.kind != "adapter"), *adapters]
    return layers, config, annotations


def _remote(
    source: RemoteSource, store: Store, report: Progress, environment: Mapping[str, str]
) -> StoredModel:
    """The model in the store; pulls it first if the store lacks it."""
    found = stored_model(source, store)
    if found is None:
        found = pull(source, store, progress=_without_success(report), environment=environment)
    found.manifest.check_servable(found.name)
    return found


def _imported(source: PathSource, store: Store, report: Progress) -> dict[str, str]:
    """Imports the file and the other parts of a split model; digests by file name."""
    path = source.path.absolute()
    parts = [path, *further_parts(path, ModelHeaders.open(path).metadata)]
    imported = {}
    for part in parts:
        imported[part.name] = import_file(part, store, may_link=True, progress=report).digest
    return imported


def _file_of(
    source: Source, store: Store, report: Progress, environment: Mapping[str, str]
) -> ManifestLayer:
    """The single file of a source, such as a projector, as a layer of kind "model"."""
    if isinstance(source, PathSource):
        return import_file(source.path.absolute(), store, may_link=True, progress=report)
    return _remote(source, store, report, environment).manifest.of_kind("model")[0]


def _adapter_layer(
    adapter: ChosenAdapter, store: Store, report: Progress, environment: Mapping[str, str]
) -> ManifestLayer:
    kind = f"{LAYER_TYPE}adapter"
    if isinstance(adapter.source, str):
        size = _uploaded(adapter.source, store).stat().st_size
        return ManifestLayer(kind, adapter.source, size, scale=adapter.scale)
    found = _file_of(adapter.source, store, report, environment)
    return ManifestLayer(kind, found.digest, found.size, scale=adapter.scale)


def _check_adapters(layers: Sequence[ManifestLayer], store: Store) -> None:
    """RequestError for a damaged adapter, or one that does not fit the model."""
    count = sum(layer.kind == "adapter" for layer in layers)
    if count > MAX_ADAPTERS:
        raise RequestError(f"{count:,} adapters are given; the limit is {MAX_ADAPTERS}")
    if not count:
        return
    kinds: dict[str, list[str]] = {kind: [] for kind in _FILES}
    named: dict[str, str] = {}
    for layer in layers:
        if layer.kind in kinds:
            part = layer.title if layer.kind == "model" else None
            name = part or store.blob(layer.digest).name
            kinds[layer.kind].append(name)
            named[name] = layer.digest
    with _linked_by_name(named, store) as folder:
        paths = {kind: [folder / name for name in names] for kind, names in kinds.items()}
        problem = _adapter_problem(paths["adapter"], min(paths["model"]), paths["projector"])
        if problem is not None:
            raise RequestError(f"adapter: {_message(problem, folder)}")


def _adapter_problem(adapters: list[Path], model: Path, projectors: list[Path]) -> str | None:
    """Why the adapters do not fit; no exception, whose traceback would keep the files mapped."""
    sources = [AdapterPath(path) for path in adapters]
    try:
        open_adapters(sources, Metadata(_metadata(model), path=model), read=False)
    except ModelFileError as error:
        return str(error)
    problem = _loading_problem(model, projectors, sources)
    # A model that cannot be served without them either may have them.
    fits = problem is None or _loading_problem(model, projectors, ()) is not None
    return None if fits else problem


def _loading_problem(
    model: Path, projectors: Sequence[Path], adapters: Sequence[AdapterPath]
) -> str | None:
    """The error of the model that is built without its weights; None if there is none."""
    options = LoadOptions(read=False, adapters=adapters)
    projector = projectors[0] if projectors else None
    try:
        load(model, device=META, dtype=torch.float32, projector=projector, options=options)
    except CaravanError as error:
        return str(error)
    return None


def _file_layers(files: Mapping[str, str], store: Store) -> list[ManifestLayer]:
    kinds: dict[str, str] = {}
    with _linked_by_name(files, store) as folder:
        for title in sorted(files):
            try:
                kinds[title] = file_kind(folder / title)
            except ModelFileError as error:
                raise RequestError(f"file {title}: {_message(error, folder)}") from None
        parts = [title for title, kind in kinds.items() if kind == "model"]
        _check_one_model(folder, parts)
    return [_file_layer(title, files[title], kinds[title], len(parts), store) for title in kinds]


def _check_one_model(folder: Path, parts: list[str]) -> None:
    if not parts:
        raise RequestError("the files contain no model; a projector alone cannot be served")
    try:
        found = ModelHeaders.open(folder / parts[0]).metadata.get("split.count", 1)
    except ModelFileError as error:
        raise RequestError(f"file {parts[0]}: {_message(error, folder)}") from None
    if found != len(parts):
        raise RequestError(
            f"{len(parts)} of the files are models, and {parts[0]} has {found} parts; a model "
            "needs one file, or all parts of a split one"
        )


def _file_layer(title: str, digest: str, kind: str, parts: int, store: Store) -> ManifestLayer:
    size = store.blob(digest).stat().st_size
    named = title if kind == "model" and parts > 1 else None
    return ManifestLayer(f"{LAYER_TYPE}{kind}", digest, size, named)


@contextmanager
def _linked_by_name(files: Mapping[str, str], store: Store) -> Iterator[Path]:
    """A folder of links that give blobs the names of their files; parts are found by name."""
    with TemporaryDirectory(prefix="creating-") as folder:
        for title, digest in files.items():
            if not is_file_name(title):
                raise RequestError(f"{title[:80]!r} is not a valid file name")
            (Path(folder) / title).symlink_to(_uploaded(digest, store).resolve())
        yield Path(folder)


def _uploaded(digest: str, store: Store) -> Path:
    blob = store.blob(check_digest(digest))
    if not blob.is_file():
        raise RequestError(f'blob "{digest}" not found; upload it first')
    return blob


def _quantized(
    layers: list[ManifestLayer], recipe: str, store: Store, report: Progress
) -> list[ManifestLayer]:
    """Replaces the model's layers by one with quantised weights."""
    models = [layer for layer in layers if layer.kind == "model"]
    names = {layer.title or "model.gguf": layer.digest for layer in models}
    status = f"quantizing model to {recipe.upper()}"

    def completed(done: int, total: int) -> None:
        report(PullProgress(status, placeholder_digest(status), total, done))

    store.check_free(sum(layer.size for layer in models))  # an upper bound for the result
    with _linked_by_name(names, store) as folder, store.temporary_folder() as target:
        try:
            first = folder / min(names)
            quantized = quantize_file(first, target / "quantized.gguf", recipe, progress=completed)
        except ModelFileError as error:
            raise RequestError(_message(error, folder)) from None
        layer = import_file(quantized, store, may_link=True, progress=report)
    return [layer, *(other for other in layers if other.kind != "model")]


def _with_changes(
    layers: list[ManifestLayer], definition: Definition, store: Store, report: Progress
) -> list[ManifestLayer]:
    """The layers with the texts, parameters, messages and licences of the definition."""
    for kind in _TEXTS:
        text = getattr(definition, kind)
        if text is not None:
            layers = [layer for layer in layers if layer.kind not in _kinds_of(kind)]
            layers += [_write_layer(kind, text.encode(), store, report)] if text else []
    if definition.parameters:
        parameters = {**_parameters(layers, store), **definition.parameters}
        layers = [layer for layer in layers if layer.kind != "params"]
        layers.append(_write_layer("params", msgspec.json.encode(parameters), store, report))
    if definition.messages is not None:
        turns = [{"role": each.role, "content": each.text} for each in definition.messages]
        layers = [layer for layer in layers if layer.kind != "messages"]
        layers += (
            [_write_layer("messages", msgspec.json.encode(turns), store, report)] if turns else []
        )
    layers += [
        _write_layer("license", text.encode(), store, report) for text in definition.licenses
    ]
    return list(dict.fromkeys(layers))


def _kinds_of(kind: str) -> tuple[str, ...]:
    return ("template", "prompt") if kind == "template" else (kind,)


def _parameters(layers: list[ManifestLayer], store: Store) -> Mapping[str, Any]:
    stated = [layer for layer in layers if layer.kind == "params"]
    if not stated:
        return {}
    try:
        return msgspec.json.decode(store.text(stated[-1]).encode(), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise StoreError(f"The base's layer params is invalid: {error}.") from None


def _write_layer(kind: str, data: bytes, store: Store, report: Progress) -> ManifestLayer:
    layer = ManifestLayer(
        f"{LAYER_TYPE}{kind}", f"sha256:{hashlib.sha256(data).hexdigest()}", len(data)
    )
    with store.blob_lock(layer.digest):
        known = store.holds(layer)
        if not known:
            store.check_space([layer])
            partial = store.partial(layer.digest)
            try:
                partial.write_bytes(data)
            except OSError as error:
                raise file_error("write", partial, error) from error
            store.install_partial(layer)
    report(PullProgress(f"{'using existing' if known else 'creating new'} layer {layer.digest}"))
    return layer


def _metadata(path: Path) -> Mapping[str, Any]:
    """The metadata of one file, which may be any part of a split model."""
    return FilePart.open(path, arrays=False).header.metadata


def _without_success(report: Progress) -> Callable[[PullProgress], None]:
    """`report` without the final "success" of a pull that is part of a larger operation."""

    def filtered(progress: PullProgress) -> None:
        if progress.status != "success":
            report(progress)

    return filtered


def _message(error: Exception | str, folder: Path) -> str:
    """The error without the path of the temporary folder."""
    return str(error).replace(f"{folder}{os.sep}", "")

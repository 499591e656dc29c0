"""Making models: a manifest of another one's layers, or of GGUF files, with what is to differ."""

import hashlib
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from model_zoo.convert.quantize import quantize_file
from model_zoo.gguf.cursor import Cursor
from model_zoo.gguf.header import read_header
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.split import further_parts
from model_zoo.sources.pull import Progress, PullProgress, placeholder_digest, pull, unheard
from model_zoo.sources.reference import PathSource, RemoteSource, Source
from model_zoo.sources.resolve import stored_model
from model_zoo.store.definition import Definition
from model_zoo.store.importing import import_file
from model_zoo.store.manifest import LAYER_TYPE, Layer, Manifest, check_digest, is_file_name
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store, StoredModel, digest_of, file_error
from runtime.errors import ModelFileError, RequestError, StoreError

# Another process may remove a blob between its making and its use.
TRIES = 3
_TEXTS = ("template", "system")


def create(
    name: ModelName,
    definition: Definition,
    store: Store,
    *,
    progress: Progress | None = None,
    environment: Mapping[str, str] = os.environ,
) -> StoredModel:
    """The model, in the store; a base that is not there is pulled.

    RequestError when files are none of GGUF or do not go together, SourceError or StoreError as
    `pull` and the store have it.
    """
    tell = progress or unheard
    for left in reversed(range(TRIES)):
        layers, config, annotations = _beginning(definition, store, tell, environment)
        if definition.quantize is not None:
            layers = _quantized(layers, definition.quantize, store, tell)
        layers = _described(layers, definition, store, tell)
        manifest = Manifest.of(layers, annotations, config=config)
        manifest.check_servable(name)
        tell(PullProgress("writing manifest"))
        try:
            stored = store.commit(name, manifest)
            break
        except StoreError:
            if not left or not store.missing(manifest):
                raise
    tell(PullProgress("success"))
    return stored


def copy(source: ModelName, destination: ModelName, store: Store) -> StoredModel:
    """The same model under another name, which takes no room; StoreError when there is none."""
    return store.commit(destination, store.manifest(source))


def file_kind(path: Path) -> str:
    """ "model", "projector" or "adapter"; ModelFileError when the file is none of GGUF's."""
    metadata = _metadata(path)
    architecture = metadata.get("general.architecture")
    kind = metadata.get("general.type")
    if kind == "adapter":
        return "adapter"
    blocks = metadata.get(f"{architecture}.block_count")
    seeing = metadata.get(f"{architecture}.vision.block_count")
    is_projector = architecture == "clip" or kind == "mmproj" or (blocks == 0 and seeing)
    return "projector" if is_projector else "model"


def _beginning(
    definition: Definition,
    store: Store,
    tell: Progress,
    environment: Mapping[str, str],
) -> tuple[list[Layer], Layer | None, Mapping[str, str]]:
    """The layers to start from, and what their manifest says beside them."""
    base = definition.base
    if isinstance(base, RemoteSource):
        found = _remote(base, store, tell, environment).manifest
        layers, config, annotations = list(found.layers), found.config, found.annotations
    else:
        files = definition.files if base is None else _imported(base, store, tell)
        tell(PullProgress("parsing GGUF"))
        layers, config, annotations = _file_layers(files, store), None, {}
    if definition.projector is not None:
        projector = _projector(definition.projector, store, tell, environment)
        layers = [*(layer for layer in layers if layer.kind != "projector"), projector]
    return layers, config, annotations


def _remote(
    source: RemoteSource, store: Store, tell: Progress, environment: Mapping[str, str]
) -> StoredModel:
    """The model of the store; pulled where it is not there."""
    found = stored_model(source, store)
    if found is None:
        unended = _without_success(tell)
        found = pull(source, store, progress=unended, environment=environment)
    found.manifest.check_servable(found.name)
    return found


def _imported(source: PathSource, store: Store, tell: Progress) -> dict[str, str]:
    """The digests of the file and of the other parts of a split model, by their names."""
    path = source.path.absolute()
    parts = [path, *further_parts(path, GGUFFile.open(path, arrays=False).metadata)]
    imported = {}
    for part in parts:
        imported[part.name] = import_file(part, store, may_link=True, progress=tell).digest
    return imported


def _projector(
    source: Source, store: Store, tell: Progress, environment: Mapping[str, str]
) -> Layer:
    if isinstance(source, PathSource):
        layer = import_file(source.path.absolute(), store, may_link=True, progress=tell)
    else:
        layer = _remote(source, store, tell, environment).manifest.of_kind("model")[0]
    return Layer(f"{LAYER_TYPE}projector", layer.digest, layer.size)


def _file_layers(files: Mapping[str, str], store: Store) -> list[Layer]:
    kinds: dict[str, str] = {}
    with _laid_out(files, store) as folder:
        for title in sorted(files):
            try:
                kinds[title] = file_kind(folder / title)
            except ModelFileError as error:
                raise RequestError(f"file {title}: {_told(error, folder)}") from None
        if "adapter" in kinds.values():
            raise RequestError("LoRA adapters are not served; take a model that has it merged in")
        parts = [title for title, kind in kinds.items() if kind == "model"]
        _check_one_model(folder, parts)
    return [_file_layer(title, files[title], kinds[title], len(parts), store) for title in kinds]


def _check_one_model(folder: Path, parts: list[str]) -> None:
    if not parts:
        raise RequestError("none of the files is a model; a projector alone cannot be served")
    try:
        found = GGUFFile.open(folder / parts[0], arrays=False).metadata.get("split.count", 1)
    except ModelFileError as error:
        raise RequestError(f"file {parts[0]}: {_told(error, folder)}") from None
    if found != len(parts):
        raise RequestError(
            f"{len(parts)} of the files are models, and {parts[0]} has {found} parts; a model is "
            "made of one file, or of all parts of a split one"
        )


def _file_layer(title: str, digest: str, kind: str, parts: int, store: Store) -> Layer:
    size = store.blob(digest).stat().st_size
    named = title if kind == "model" and parts > 1 else None
    return Layer(f"{LAYER_TYPE}{kind}", digest, size, named)


@contextmanager
def _laid_out(files: Mapping[str, str], store: Store) -> Iterator[Path]:
    """The blobs under the names of their files: parts of a split model are found by these."""
    with TemporaryDirectory(prefix="creating-") as folder:
        for title, digest in files.items():
            if not is_file_name(title):
                raise RequestError(f"{title[:80]!r} cannot be the name of a file")
            blob = store.blob(check_digest(digest))
            if not blob.is_file():
                raise RequestError(f'blob "{digest}" not found; upload it first')
            (Path(folder) / title).symlink_to(blob.resolve())
        yield Path(folder)


def _quantized(layers: list[Layer], recipe: str, store: Store, tell: Progress) -> list[Layer]:
    """The model's layers replaced by one whose weights are as the recipe has them."""
    models = [layer for layer in layers if layer.kind == "model"]
    names = {layer.title or "model.gguf": layer.digest for layer in models}
    status = f"quantizing model to {recipe.upper()}"

    def told(done: int, total: int) -> None:
        tell(PullProgress(status, placeholder_digest(status), total, done))

    store.check_free(sum(layer.size for layer in models))  # the result has no more
    with _laid_out(names, store) as folder, store.workplace() as place:
        try:
            first = folder / min(names)
            made = quantize_file(first, place / "made.gguf", recipe, progress=told)
        except ModelFileError as error:
            raise RequestError(_told(error, folder)) from None
        layer = Layer(f"{LAYER_TYPE}model", digest_of(made), made.stat().st_size)
        with store.blob_lock(layer.digest):
            if not store.holds(layer):
                made.replace(store.partial(layer.digest))
                store.keep(layer)
    return [layer, *(other for other in layers if other.kind != "model")]


def _described(
    layers: list[Layer], definition: Definition, store: Store, tell: Progress
) -> list[Layer]:
    """The layers with the texts, parameters, messages and licences of the definition."""
    for kind in _TEXTS:
        text = getattr(definition, kind)
        if text is not None:
            layers = [layer for layer in layers if layer.kind not in _spellings(kind)]
            layers += [_kept(kind, text.encode(), store, tell)] if text else []
    if definition.parameters:
        parameters = {**_parameters(layers, store), **definition.parameters}
        layers = [layer for layer in layers if layer.kind != "params"]
        layers.append(_kept("params", msgspec.json.encode(parameters), store, tell))
    if definition.messages is not None:
        said = [{"role": each.role, "content": each.text} for each in definition.messages]
        layers = [layer for layer in layers if layer.kind != "messages"]
        layers += [_kept("messages", msgspec.json.encode(said), store, tell)] if said else []
    layers += [_kept("license", text.encode(), store, tell) for text in definition.licenses]
    return list(dict.fromkeys(layers))


def _spellings(kind: str) -> tuple[str, ...]:
    return ("template", "prompt") if kind == "template" else (kind,)


def _parameters(layers: list[Layer], store: Store) -> Mapping[str, Any]:
    stated = [layer for layer in layers if layer.kind == "params"]
    if not stated:
        return {}
    try:
        return msgspec.json.decode(store.text(stated[-1]).encode(), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise StoreError(f"The base's layer params is not sound: {error}.") from None


def _kept(kind: str, data: bytes, store: Store, tell: Progress) -> Layer:

    layer = Layer(f"{LAYER_TYPE}{kind}", f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))
    with store.blob_lock(layer.digest):
        known = store.holds(layer)
        if not known:
            store.check_room([layer])
            partial = store.partial(layer.digest)
            try:
                partial.write_bytes(data)
            except OSError as error:
                raise file_error("write", partial, error) from error
            store.keep(layer)
    tell(PullProgress(f"{'using existing' if known else 'creating new'} layer {layer.digest}"))
    return layer


def _metadata(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be read: {error}.") from None
    return read_header(Cursor(data, str(path)), arrays=False).metadata


def _without_success(tell: Progress) -> Callable[[PullProgress], None]:
    """A pull on the way to something else is not the end of it."""

    def told(progress: PullProgress) -> None:
        if progress.status != "success":
            tell(progress)

    return told


def _told(error: Exception, folder: Path) -> str:
    """Without the folder where the file lay for a moment."""
    return str(error).replace(f"{folder}{os.sep}", "")

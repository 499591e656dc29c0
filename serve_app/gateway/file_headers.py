"""What can be told of models without loading them: from manifests and headers of their files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.registry import quantization
from model_zoo.store.store import StoredModel
from runtime.errors import CaravanError
from serve_app.config.options import Options
from serve_app.config.settings import ModelSettings
from serve_app.gateway.listing import ListedModel
from serve_app.replica.resolved_model import present_origin

# Architectures that only ever make vectors of texts.
ENCODERS = frozenset({"bert", "nomic-bert"})


def listed_file(
    name: str, path: Path, *, sees: bool, options: Options, stored: StoredModel | None
) -> ListedModel:
    """A model as lists tell it; ModelFileError when the file is damaged.

    `sees`: it has a file with vision beside this one.
    """
    file = GGUFFile.open(path, arrays=False)
    metadata = Metadata(file.metadata, path=file.path)
    manifest = None if stored is None else stored.manifest
    return ListedModel(
        name=name,
        digest=file.digest if manifest is None else manifest.digest,
        file_bytes=file.size_bytes if manifest is None else manifest.size_bytes,
        modified_at=file.modified_at if stored is None else stored.modified_at,
        architecture=metadata.architecture,
        quantization=quantization(file, metadata),
        parameter_count=sum(info.elements for info in file.tensors.values()),
        context_length=metadata.get("context_length", int, 0),
        embedding_length=metadata.get("embedding_length", int, 0),
        capabilities=_capabilities(metadata, sees=sees),
        options=options,
    )


def listed_model(settings: ModelSettings, environment: Mapping[str, str]) -> ListedModel | None:
    """A configured model; None unless its files are on this machine, and sound."""
    try:
        origin = present_origin(settings, environment)
        if origin is None:
            return None
        return listed_file(
            settings.name,
            origin.path,
            sees=origin.projector is not None,
            options=origin.options,
            stored=origin.stored,
        )
    except CaravanError:
        return None


def _capabilities(metadata: Metadata, *, sees: bool) -> tuple[str, ...]:
    """As the loaded model would report them, except for an unsupported vision model."""
    embeds = metadata.architecture in ENCODERS or bool(metadata.get("pooling_type", int, 0))
    found: dict[str, Any] = {
        "completion": not embeds,
        "vision": sees or metadata.has("vision.block_count"),
        "embedding": embeds,
    }
    return tuple(name for name, holds in found.items() if holds)

"""One rank's part of the text model in a file, for ranks without tokenizer and vision model."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from model_zoo.gguf.adapter_path import AdapterPath
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.model_headers import ModelHeaders
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import ScopeOptions, TensorScope
from model_zoo.registry import LoadOptions, check_divisible, class_for, open_adapters
from runtime.worker.model import DecoderModel


def files_digest(
    path: Path, adapters: Sequence[AdapterPath] = (), *, blobs: Sequence[str] = ()
) -> str:
    """A digest that ranks compare to verify that they have the same files and scales; cheap to
    compute. `blobs`: the digests of the model's files, if they are known: versions of a model may
    have the same headers."""
    digest = hashlib.sha256(ModelHeaders.open(path).digest.encode())
    for blob in blobs:
        digest.update(blob.encode())
    for adapter in adapters:
        stated = ModelHeaders.open(adapter.path).digest
        digest.update(f"{stated} {adapter.scale!r}".encode())
    return digest.hexdigest()


def load_part(
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    options: LoadOptions,
) -> DecoderModel:
    """The decoder with this rank's weights; arguments and errors are those of `registry.load`.
    Options of vision models, placement and sharing have no effect."""
    file = GGUFFile.open(path)
    metadata = Metadata(file.metadata, path=file.path)
    decoder_class = class_for(metadata)
    check_divisible(metadata, options.ranks)
    scope = TensorScope(
        file,
        device=device,
        dtype=dtype,
        options=ScopeOptions(
            context_tokens=options.context_tokens,
            ranks=options.ranks,
            adapters=open_adapters(options.adapters, metadata),
            compute=options.compute,
            deterministic=options.deterministic,
            tiling=options.tiling,
            progress=options.progress,
        ),
    )
    return decoder_class(scope, metadata)

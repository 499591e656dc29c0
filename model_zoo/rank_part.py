"""One rank's part of the text model in a file, for ranks without tokenizer and vision model."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from model_zoo.gguf.adapter_path import AdapterPath
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import ScopeOptions, TensorScope
from model_zoo.gguf.tensors import Progress
from model_zoo.gguf.tiled_copy import TilingOptions
from model_zoo.registry import check_divisible, class_for, open_adapters
from runtime.distributed.ranks import Ranks
from runtime.quant.block_types import Compute
from runtime.worker.model import DecoderModel


def files_digest(path: Path, adapters: Sequence[AdapterPath] = ()) -> str:
    """A digest that ranks compare to verify that they have the same files and scales; cheap to
    compute."""
    digest = hashlib.sha256(GGUFFile.open(path, arrays=False).digest.encode())
    for adapter in adapters:
        stated = GGUFFile.open(adapter.path, arrays=False).digest
        digest.update(f"{stated} {adapter.scale!r}".encode())
    return digest.hexdigest()


def load_part(
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    context_tokens: int | None,
    ranks: Ranks,
    progress: Progress | None = None,
    adapters: Sequence[AdapterPath] = (),
    compute: Compute = Compute.EXACT,
    deterministic: bool = False,
    tiling: TilingOptions | None = None,
) -> DecoderModel:
    """The decoder with this rank's weights; the other arguments and errors are those of
    `registry.load` and its options."""
    file = GGUFFile.open(path)
    metadata = Metadata(file.metadata, path=file.path)
    decoder_class = class_for(metadata)
    check_divisible(metadata, ranks)
    scope = TensorScope(
        file,
        device=device,
        dtype=dtype,
        options=ScopeOptions(
            context_tokens=context_tokens,
            ranks=ranks,
            adapters=open_adapters(adapters, metadata),
            compute=compute,
            deterministic=deterministic,
            tiling=tiling,
            progress=progress,
        ),
    )
    return decoder_class(scope, metadata)

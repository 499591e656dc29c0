"""One rank's part of the text model in a file, for ranks without tokenizer and vision model."""

from pathlib import Path

import torch

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from model_zoo.gguf.tensors import Progress
from model_zoo.registry import check_divisible, class_for
from runtime.distributed.ranks import Ranks
from runtime.worker.model import DecoderModel


def file_digest(path: Path) -> str:
    """A digest that ranks compare to verify that they have the same file; cheap to compute."""
    return GGUFFile.open(path, arrays=False).digest


def load_part(
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    context_tokens: int | None,
    ranks: Ranks,
    progress: Progress | None = None,
) -> DecoderModel:
    """The decoder with this rank's weights; `context_tokens` and errors as in `registry.load`."""
    file = GGUFFile.open(path)
    metadata = Metadata(file.metadata, path=file.path)
    decoder_class = class_for(metadata)
    check_divisible(metadata, ranks)
    scope = TensorScope(
        file,
        device=device,
        dtype=dtype,
        context_tokens=context_tokens,
        progress=progress,
        ranks=ranks,
    )
    return decoder_class(scope, metadata)

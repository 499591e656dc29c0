"""A model of Llama 3.1 8B's shape in Q4_K_M, whose file has its full size and no contents."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from bench.make_model import Shape, kind_of, write_sizes

SHAPE = Shape(name="8b", hidden=4096, feed_forward=14336, head_dim=128)
VOCABULARY = 128256
EMBEDDING_BYTES = VOCABULARY * SHAPE.hidden // 256 * 144  # of which a step reads few rows
_F32, _Q4_K, _Q6_K = (GGMLQuantizationType[name] for name in ("F32", "Q4_K", "Q6_K"))


def write_large_model(path: Path, *, layers: int = 32) -> None:
    """Its 4.9 GB are a hole in the file, which takes a few kilobytes on the disk."""
    writer = GGUFWriter(path, "llama")
    write_sizes(writer, replace(SHAPE, layers=layers), VOCABULARY)
    data_bytes = 0
    for name, size, kind in _tensors(layers):
        elements, block_bytes = GGML_QUANT_SIZES[kind]
        nbytes = prod(size) // elements * block_bytes
        writer.add_tensor_info(name, size, np.dtype(np.float32), nbytes, kind)
        data_bytes += GGUFWriter.ggml_pad(nbytes, writer.data_alignment)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header_bytes = GGUFWriter.ggml_pad(path.stat().st_size, writer.data_alignment)
    with path.open("r+b") as file:
        file.truncate(header_bytes + data_bytes)


def _tensors(layers: int) -> Iterator[tuple[str, tuple[int, ...], GGMLQuantizationType]]:
    """Names, shapes and types; as llama.cpp mixes them."""
    yield "token_embd.weight", (VOCABULARY, SHAPE.hidden), _Q4_K
    yield "output.weight", (VOCABULARY, SHAPE.hidden), _Q6_K
    yield "output_norm.weight", (SHAPE.hidden,), _F32
    yield "rope_freqs.weight", (SHAPE.head_dim // 2,), _F32
    for layer in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", (SHAPE.hidden,), _F32
        for name, size in SHAPE.matrices().items():
            kind = kind_of("Q4_K_M", name, layer, layers)
            yield f"blk.{layer}.{name}.weight", size, kind

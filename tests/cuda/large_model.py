"""Models of the shape of Llama 3.1 8B, or another, whose files have their full size and no
contents."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from bench.make_model import Shape, kind_of, write_sizes

SHAPE = Shape(name="8b", hidden=4096, feed_forward=14336, head_dim=128)
VOCABULARY = 128256
_F32, _Q4_K, _Q6_K = (GGMLQuantizationType[name] for name in ("F32", "Q4_K", "Q6_K"))


def write_large_model(
    path: Path, *, layers: int = 32, label: str = "Q4_K_M", shape: Shape = SHAPE
) -> None:
    """Its gigabytes are a hole in the file, which takes a few kilobytes on the disk. `label`: see
    `bench.make_model.kind_of`."""
    writer = GGUFWriter(path, "qwen3moe" if shape.experts else "llama")
    write_sizes(writer, replace(shape, layers=layers), VOCABULARY)
    data_bytes = 0
    for name, size, kind in _tensors(layers, label, shape):
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


def _tensors(
    layers: int, label: str, shape: Shape
) -> Iterator[tuple[str, tuple[int, ...], GGMLQuantizationType]]:
    """Names, shapes and types; as llama.cpp mixes them."""
    mixed, other = label == "Q4_K_M", kind_of(label, "output", 0, layers)
    yield "token_embd.weight", (VOCABULARY, shape.hidden), _Q4_K if mixed else other
    yield "output.weight", (VOCABULARY, shape.hidden), _Q6_K if mixed else other
    yield "output_norm.weight", (shape.hidden,), _F32
    vectors = {"attn_norm": (shape.hidden,), "ffn_norm": (shape.hidden,)}
    if shape.experts:
        vectors |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (shape.head_dim,))
        vectors["ffn_gate_inp"] = shape.experts, shape.hidden
    else:
        yield "rope_freqs.weight", (shape.head_dim // 2,), _F32
    for layer in range(layers):
        for name, size in vectors.items():
            yield f"blk.{layer}.{name}.weight", size, _F32
        for name, size in shape.matrices().items():
            yield f"blk.{layer}.{name}.weight", size, kind_of(label, name, layer, layers)

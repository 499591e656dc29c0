"""Experts of gpt-oss in the types of its files, its clamped feed-forward and its sinks."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from model_zoo.gguf.reader import GGUFFile
from runtime.errors import UnsupportedModelError
from runtime.quant.block_types import MXFP4_PAIRS
from tests.families.agreement import (
    PROMPT,
    TOLERANCE,
    Pair,
    check_long_prompt,
    random_tokens,
)
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.families.text_family import changed, pair_of
from tests.gguf_files import matrices, rewrite

FLAVOURS = pytest.mark.parametrize("flavour", ["llama.cpp", "ollama"])
GPT_OSS = TEXT_MODELS["gpt-oss"]


@FLAVOURS
@pytest.mark.parametrize("paired", [False, True])
def test_experts_in_mxfp4_agree(tmp_path, flavour, paired) -> None:
    """In GGUF's order of nibbles, and in that of the checkpoints, under an unassigned type id."""
    path = tmp_path / "tiny.gguf"
    twin = GPT_OSS.write(path, flavour=flavour)
    tensors = {}
    for name, array in matrices(path).items():
        if "_exps.weight" in name:
            blocks = gguf.quants.quantize(array, gguf.GGMLQuantizationType.MXFP4)
            rounded = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
            set_experts(twin, name, rounded.reshape(array.shape))
            tensors[name] = (with_neighbours_paired(blocks) if paired else blocks, "MXFP4")
    file = changed(path, tensors=tensors)
    if paired:
        renumber(file, tensors, MXFP4_PAIRS.id)
    types = {info.type.name for n, info in GGUFFile.open(file).tensors.items() if n in tensors}
    assert types == {"MXFP4_PAIRS" if paired else "MXFP4"}
    check_long_prompt(pair_of(file, twin))


def test_biases_of_experts_in_bfloat16_agree(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = GPT_OSS.write(path)
    tensors, kind = {}, gguf.GGMLQuantizationType.BF16
    for name, array in matrices(path).items():
        if "_exps.bias" in name:
            stored = gguf.quants.quantize(array, kind)
            set_experts(twin, name, gguf.quants.dequantize(stored, kind))
            tensors[name] = (stored, "BF16")
    check_long_prompt(pair_of(changed(path, tensors=tensors), twin))


def test_the_unassigned_type_id_is_unknown_to_other_architectures(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    GPT_OSS.write(path)
    name = "blk.0.ffn_down_exps.weight"
    blocks = gguf.quants.quantize(matrices(path)[name], gguf.GGMLQuantizationType.MXFP4)
    keys = {"general.architecture": "llama"}
    other = rewrite(path, tmp_path / "other.gguf", keys=keys, tensors={name: (blocks, "MXFP4")})
    renumber(other, [name], MXFP4_PAIRS.id)
    with pytest.raises(UnsupportedModelError, match="type id 4"):
        GGUFFile.open(other)


def test_large_gates_and_ups_are_clamped(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = GPT_OSS.write(path)
    tensors = {n: 8 * a for n, a in matrices(path).items() if "gate_exps" in n or "up_exps" in n}
    for name, array in tensors.items():
        set_experts(twin, name, array)
    pair = pair_of(changed(path, tensors=tensors), twin)
    check_long_prompt(pair)
    for layer in twin.model.layers:
        layer.mlp.experts.limit = 1e9
    assert not agrees(pair)


def test_sinks_show_in_the_logits(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = GPT_OSS.write(path)
    none = np.full(4, -1e9, np.float32)
    tensors = {f"{prefix}.attn_sinks.weight": none for prefix in ("blk.0", "blk.1", "blk.2")}
    assert not agrees(pair_of(changed(path, tensors=tensors), twin))


def agrees(pair: Pair) -> bool:
    tokens = random_tokens(PROMPT, seed=1)
    logits = PagedDecoder(pair.decoder).feed({0: tokens})
    return pair.worst(logits, pair.expected(tokens)) <= 10 * TOLERANCE


def set_experts(twin: Any, name: str, array: np.ndarray) -> None:
    """Put a file's tensor of experts into the twin, which has [experts, in, out]."""
    _, layer, tensor, kind = name.split(".")
    experts, values = twin.model.layers[int(layer)].mlp.experts, torch.from_numpy(array.copy())
    values = values.transpose(1, 2) if kind == "weight" else values
    suffix = "" if kind == "weight" else "_bias"
    if "down" in tensor:
        getattr(experts, f"down_proj{suffix}").copy_(values)
    else:
        which = slice(0 if "gate" in tensor else 1, None, 2)
        getattr(experts, f"gate_up_proj{suffix}")[..., which] = values


def with_neighbours_paired(stored: np.ndarray) -> np.ndarray:
    """Blocks of MXFP4 with elements 2k and 2k + 1 in byte k."""
    blocks = stored.reshape(-1, 17)
    nibbles = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1)
    paired = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return np.concatenate([blocks[:, :1], paired], axis=1).reshape(stored.shape)


def renumber(path: Path, names: Any, number: int) -> None:
    """Give tensors of three dimensions another number of a type, in the file's header."""
    data = bytearray(path.read_bytes())
    for name in names:
        begin = data.index(struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", 3))
        at = begin + 8 + len(name) + 4 + 3 * 8
        data[at : at + 4] = struct.pack("<I", number)
    path.write_bytes(data)

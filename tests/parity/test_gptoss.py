"""Logits of gpt-oss against `transformers`, on tiny random models, in all its files' spellings."""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import GptOssConfig

from model_zoo.gguf.reader import GGUFFile
from runtime.errors import UnsupportedModelError
from runtime.quant.block_types import MXFP4_PAIRS
from tests.gguf_files import matrices, rewrite
from tests.parity.agreement import (
    CHECKS,
    PROMPT,
    QUANTIZED_TYPES,
    TOLERANCE,
    Pair,
    check_long_prompt,
    check_quantized,
    load_decoder,
    make_pair,
    random_tokens,
)
from tests.parity.paged_decoder import PagedDecoder
from tests.tiny_models import tiny_tokenizer, write_tiny

LAYERS, EXPERTS = 3, 6
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}


def config(**changes) -> GptOssConfig:
    return GptOssConfig(**(SIZES | changes))


CONFIGS = {
    "plain": config(),
    "one_expert_for_a_row": config(num_experts_per_tok=1),
    "all_experts_for_a_row": config(num_experts_per_tok=EXPERTS),
    "shorter_original_context": config(rope_parameters=YARN),
    "window_of_one": config(sliding_window=1),
}
LARGE = config(hidden_size=256, head_dim=64, intermediate_size=256)
BOTH = pytest.mark.parametrize("flavour", ["llama.cpp", "ollama"])


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type)


def pair_of(path: Path, twin: Any) -> Pair:
    return Pair(load_decoder(path), twin, tiny_tokenizer().get_vocab_size())


def changed(path: Path, keys: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    architecture = GGUFFile.open(path).metadata["general.architecture"]
    named = {f"{architecture}.{key}": value for key, value in keys.items()}
    named["general.architecture"] = architecture
    return rewrite(path, path.with_name("changed.gguf"), keys=named, tensors=tensors)


def test_ollamas_files_agree(tmp_path) -> None:
    """They name no kind of scaling and no width of experts."""
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config(), flavour="ollama")
    names = set(GGUFFile.open(path).tensors)
    assert {"blk.0.attn_out.weight", "blk.0.attn_sinks", "blk.0.ffn_norm.weight"} <= names
    keys = {"rope.scaling.type": None, "expert_feed_forward_length": None}
    check_long_prompt(pair_of(changed(path, keys, {}), twin))


@BOTH
def test_one_tensor_with_the_rows_of_q_k_and_v_agrees(tmp_path, flavour) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config(), flavour=flavour)
    stored, tensors = matrices(path), {}
    for prefix in prefixes():
        for kind in ("weight", "bias"):
            names = [f"{prefix}.attn_{part}.{kind}" for part in "qkv"]
            tensors[f"{prefix}.attn_qkv.{kind}"] = np.concatenate([stored[n] for n in names])
            tensors |= dict.fromkeys(names)
    check_long_prompt(pair_of(changed(path, {}, tensors), twin))


@BOTH
def test_one_tensor_with_alternating_rows_of_gate_and_up_agrees(tmp_path, flavour) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config(), flavour=flavour)
    stored, tensors = matrices(path), {}
    for prefix in prefixes():
        for kind in ("weight", "bias"):
            names = [f"{prefix}.ffn_{part}_exps.{kind}" for part in ("gate", "up")]
            rows = np.stack([stored[name] for name in names], axis=2)
            whole = rows.reshape(EXPERTS, -1, *rows.shape[3:])
            tensors[f"{prefix}.ffn_gate_up_exps.{kind}"] = whole
            tensors |= dict.fromkeys(names)
    check_long_prompt(pair_of(changed(path, {}, tensors), twin))


@BOTH
@pytest.mark.parametrize("paired", [False, True])
def test_experts_in_mxfp4_agree(tmp_path, flavour, paired) -> None:
    """In GGUF's order of nibbles, and in that of the checkpoints, under the number of no type."""
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config(), flavour=flavour)
    tensors = {}
    for name, array in matrices(path).items():
        if "_exps.weight" in name:
            blocks = gguf.quants.quantize(array, gguf.GGMLQuantizationType.MXFP4)
            rounded = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
            set_experts(twin, name, rounded.reshape(array.shape))
            tensors[name] = (with_neighbours_paired(blocks) if paired else blocks, "MXFP4")
    file = changed(path, {}, tensors)
    if paired:
        renumber(file, tensors, MXFP4_PAIRS.id)
    types = {info.type.name for n, info in GGUFFile.open(file).tensors.items() if n in tensors}
    assert types == {"MXFP4_PAIRS" if paired else "MXFP4"}
    check_long_prompt(pair_of(file, twin))


def test_biases_of_experts_in_bfloat16_agree(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config())
    tensors, kind = {}, gguf.GGMLQuantizationType.BF16
    for name, array in matrices(path).items():
        if "_exps.bias" in name:
            stored = gguf.quants.quantize(array, kind)
            set_experts(twin, name, gguf.quants.dequantize(stored, kind))
            tensors[name] = (stored, "BF16")
    check_long_prompt(pair_of(changed(path, {}, tensors), twin))


def test_the_number_of_no_type_stays_unknown_to_other_architectures(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path, config())
    name = "blk.0.ffn_down_exps.weight"
    blocks = gguf.quants.quantize(matrices(path)[name], gguf.GGMLQuantizationType.MXFP4)
    keys = {"general.architecture": "llama"}
    other = rewrite(path, tmp_path / "other.gguf", keys=keys, tensors={name: (blocks, "MXFP4")})
    renumber(other, [name], MXFP4_PAIRS.id)
    with pytest.raises(UnsupportedModelError, match="type id 4"):
        GGUFFile.open(other)


def test_large_gates_and_ups_are_clamped(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config())
    tensors = {n: 8 * a for n, a in matrices(path).items() if "gate_exps" in n or "up_exps" in n}
    for name, array in tensors.items():
        set_experts(twin, name, array)
    pair = pair_of(changed(path, {}, tensors), twin)
    check_long_prompt(pair)
    for layer in twin.model.layers:
        layer.mlp.experts.limit = 1e9
    assert not agrees(pair)


@pytest.mark.parametrize(
    "key, value",
    [
        ("attention.sliding_window", 17),
        ("rope.scaling.factor", 31.0),
        ("rope.scaling.original_context_length", 2048),
        ("rope.freq_base", 1000.0),
        ("expert_used_count", 3),
        ("attention.layer_norm_rms_epsilon", 0.1),
    ],
)
def test_every_key_shows_in_the_logits(tmp_path, key: str, value: object) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config())
    assert not agrees(pair_of(changed(path, {key: value}, {}), twin))


def test_sinks_show_in_the_logits(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config())
    none = np.full(4, -1e9, np.float32)
    tensors = {f"{prefix}.attn_sinks.weight": none for prefix in prefixes()}
    assert not agrees(pair_of(changed(path, {}, tensors), twin))


def agrees(pair: Pair) -> bool:
    tokens = random_tokens(PROMPT, seed=1)
    logits = PagedDecoder(pair.decoder).feed({0: tokens})
    return pair.worst(logits, pair.expected(tokens)) <= 10 * TOLERANCE


def prefixes() -> Iterator[str]:
    yield from (f"blk.{layer}" for layer in range(LAYERS))


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

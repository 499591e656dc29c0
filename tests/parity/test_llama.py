"""Logits of the llama family against `transformers`, float32 and eager, on tiny random models."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig

from model_zoo.gguf.reader import GGUFFile
from tests.gguf_files import matrices, rewrite
from tests.parity.agreement import (
    CHECKS,
    PROMPT,
    QUANTIZED_TYPES,
    TOLERANCE,
    Pair,
    check_declared_memory,
    check_quantized,
    load_decoder,
    make_pair,
    random_tokens,
)
from tests.parity.paged_decoder import PagedDecoder
from tests.tiny_models import CONFIGS, write_tiny_llama

# Configuration, type of the matrices, types that differ from it.
CASES = [
    *((config, "F32", {}) for config in CONFIGS),
    *(("rows_of_256", type, {}) for type in ("F16", "BF16", "Q8_0", "Q4_0", "Q5_K", "Q6_K")),
    ("rows_of_256", "Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}),
    ("tied", "Q8_0", {"attn_k": "F16"}),
    ("gqa", "Q5_0", {"ffn_down": "Q5_1", "attn_v": "Q4_1", "token_embd": "IQ4_NL"}),
    ("rows_of_256", "Q3_K", {"attn_v": "IQ4_XS", "ffn_down": "Q2_K", "token_embd": "Q2_K"}),
    ("rows_of_256", "MXFP4", {"attn_v": "TQ2_0", "ffn_up": "TQ1_0"}),
    ("rows_of_256", "IQ2_XXS", {"attn_v": "IQ1_M", "ffn_down": "IQ3_S", "token_embd": "IQ2_S"}),
]


SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
# Relatives that share the architecture's name in files.
RELATIVES = {
    "yarn": LlamaConfig(**SIZES, rope_parameters={**YARN, "factor": 4.0}),
    "yarn_with_all_its_numbers": LlamaConfig(
        **SIZES,
        rope_parameters={
            **YARN,
            "factor": 4.0,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "attention_factor": 0.7,
        },
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "nemo": MistralConfig(**SIZES, head_dim=32, sliding_window=None),
}
LARGE = LlamaConfig(**(SIZES | {"hidden_size": 256, "intermediate_size": 256}))


def load_pair(path: Path, twin: LlamaForCausalLM) -> Pair:
    known = len(GGUFFile.open(path).metadata["tokenizer.ggml.tokens"])
    return Pair(load_decoder(path), twin, known)


def name_of(case: tuple[str, str, dict[str, str]]) -> str:
    return "-".join([*case[:2], *case[2]])


@pytest.fixture(scope="module", params=CASES, ids=name_of)
def pair(request, tmp_path_factory) -> Pair:
    config, type, overrides = request.param
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return load_pair(path, write_tiny_llama(path, config=config, type=type, overrides=overrides))


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Path, LlamaForCausalLM]:
    path = tmp_path_factory.mktemp("models") / "plain.gguf"
    return path, write_tiny_llama(path, config="gqa")


@pytest.fixture(scope="module", params=RELATIVES)
def relative(request, tmp_path_factory) -> Pair:
    return make_pair(RELATIVES[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("check", CHECKS)
def test_logits_of_relatives_agree(relative, check) -> None:
    CHECKS[check](relative)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type)


def test_output_rows_come_in_the_order_asked_for(plain) -> None:
    pair = load_pair(*plain)
    tokens = random_tokens(PROMPT, seed=6)
    logits = PagedDecoder(pair.decoder).feed({0: tokens}, outputs=[40, 3, 17])
    assert pair.worst(logits, pair.expected(tokens)[[40, 3, 17]]) <= TOLERANCE


def test_a_batch_may_want_no_logits(plain) -> None:
    pair = load_pair(*plain)
    tokens = random_tokens(PROMPT, seed=7)
    paged = PagedDecoder(pair.decoder)
    assert paged.feed({0: tokens[:-1]}, outputs=[]).shape == (0, pair.decoder.vocab_size)
    assert pair.worst(paged.feed({0: tokens[-1:]}), pair.expected(tokens)[-1:]) <= TOLERANCE


def test_one_tensor_with_the_rows_of_q_k_and_v_agrees(plain, tmp_path) -> None:
    path, twin = plain
    changed: dict[str, np.ndarray | None] = {}
    for block in range(2):
        names = [f"blk.{block}.attn_{part}.weight" for part in "qkv"]
        changed[f"blk.{block}.attn_qkv.weight"] = np.concatenate([matrices(path)[n] for n in names])
        changed |= dict.fromkeys(names)
    pair = load_pair(rewrite(path, tmp_path / "fused.gguf", tensors=changed), twin)
    tokens = random_tokens(PROMPT, seed=8)
    assert pair.worst(PagedDecoder(pair.decoder).feed({0: tokens}), pair.expected(tokens)) <= 1e-4


def test_values_narrower_than_keys_agree(plain, tmp_path) -> None:
    """The twin has the missing half of each value head as zeros."""
    path = tmp_path / "tiny.gguf"
    twin = write_tiny_llama(path, config="gqa")
    heads, kv_heads, dim, kept = 4, 2, 16, 8
    changed: dict[str, np.ndarray | None] = {}
    for block, layer in enumerate(twin.model.layers):
        attention, prefix = layer.self_attn, f"blk.{block}.attn"
        values = attention.v_proj.weight.view(kv_heads, dim, -1)
        values[:, kept:] = 0
        changed[f"{prefix}_v.weight"] = values[:, :kept].flatten(0, 1).numpy()
        output = attention.o_proj.weight.view(-1, heads, dim)[:, :, :kept]
        changed[f"{prefix}_output.weight"] = output.flatten(1).numpy()
    keys = {"llama.attention.value_length": kept}
    pair = load_pair(rewrite(path, tmp_path / "narrow.gguf", keys=keys, tensors=changed), twin)
    tokens = random_tokens(PROMPT, seed=9)
    assert pair.decoder.cache_layers[0].value_dim == kept
    assert pair.worst(PagedDecoder(pair.decoder).feed({0: tokens}), pair.expected(tokens)) <= 1e-4


def test_heads_rotated_in_part_agree(tmp_path) -> None:
    """The twin turns the other pairs by an angle of nought."""
    path = tmp_path / "tiny.gguf"
    twin = write_tiny_llama(path, config="gqa")
    rotated, pairs = 8, 8
    frequencies = torch.zeros(pairs)
    frequencies[: rotated // 2] = 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
    twin.model.rotary_emb.inv_freq = frequencies
    keys = {"llama.rope.dimension_count": rotated}
    pair = load_pair(rewrite(path, tmp_path / "partly.gguf", keys=keys), twin)
    tokens = random_tokens(PROMPT, seed=10)
    assert pair.worst(PagedDecoder(pair.decoder).feed({0: tokens}), pair.expected(tokens)) <= 1e-4


def test_older_spellings_of_keys_agree(tmp_path) -> None:
    """Sizes as arrays, linear scaling under its old key, the head size left to be derived."""
    path = tmp_path / "tiny.gguf"
    twin = write_tiny_llama(path, config="linear_rope")
    keys = {
        "llama.attention.head_count": [4, 4],
        "llama.attention.head_count_kv": [2, 2],
        "llama.feed_forward_length": [96, 96],
        "llama.rope.scaling.type": None,
        "llama.rope.scaling.factor": None,
        "llama.rope.scale_linear": 2.0,
        "llama.rope.freq_base": None,
        "llama.attention.key_length": None,
        "llama.attention.value_length": None,
        "llama.rope.dimension_count": None,
        "llama.vocab_size": None,
    }
    pair = load_pair(rewrite(path, tmp_path / "older.gguf", keys=keys), twin)
    tokens = random_tokens(PROMPT, seed=11)
    assert pair.worst(PagedDecoder(pair.decoder).feed({0: tokens}), pair.expected(tokens)) <= 1e-4


def test_bfloat16_activations_stay_near(plain) -> None:
    path, twin = plain
    pair = Pair(load_decoder(path, torch.bfloat16), twin, load_pair(path, twin).known)
    tokens = random_tokens(PROMPT, seed=12)
    logits = PagedDecoder(pair.decoder, dtype=torch.bfloat16).feed({0: tokens})
    assert TOLERANCE < pair.worst(logits, pair.expected(tokens)) < 0.5
    expected = pair.expected(tokens)
    divergence = (expected.exp() * (expected - logits.log_softmax(-1)[:, : pair.known])).sum(-1)
    assert divergence.max() < 0.01


@pytest.mark.parametrize("type", ["F32", "Q5_K", "IQ2_XS"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, outputs", [(1, 1), (1000, 3), (1000, 1000)])
def test_a_step_allocates_no_more_than_it_declares(tmp_path, type, dtype, rows, outputs) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path, config="rows_of_256", type=type)
    check_declared_memory(load_decoder(path, dtype), rows, outputs, dtype=dtype)

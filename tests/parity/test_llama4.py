"""Logits of Llama 4, the text model, against `transformers`, on tiny random models."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Llama4TextConfig

from tests.gguf_files import rewrite
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

# Chunks and steps of the temperature that a short prompt passes.
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 5,  # the fourth sees everything and does not turn
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 16,
    "floor_scale": 8,
    "attn_scale": 0.5,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config(**changes) -> Llama4TextConfig:
    return Llama4TextConfig(**(SIZES | changes))


CONFIGS = {
    "plain": config(),
    "experts_in_every_other_layer": config(interleave_moe_layer_step=2),
    "two_experts_for_a_row": config(num_experts_per_tok=2),
    "no_norms_of_queries_and_keys": config(use_qk_norm=False),
    "no_temperature": config(attn_temperature_tuning=False),
    "every_other_layer_sees_all": config(no_rope_layer_interval=2),
    "rope_factors": config(rope_parameters=LLAMA3_ROPE),
    "chunks_of_one": config(attention_chunk_size=1),
    "other_bases": config(rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    "heads_wider_than_hidden": config(head_dim=32),
}
LARGE = config(
    hidden_size=256, head_dim=64, intermediate_size=256, intermediate_size_mlp=512,
    interleave_moe_layer_step=2,
)  # fmt: skip


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


def changed(path: Path, **keys) -> Path:
    """A copy with other keys, `__` for a dot and without the architecture."""
    named = {f"llama4.{name.replace('__', '.')}": value for name, value in keys.items()}
    named["general.architecture"] = "llama4"
    return rewrite(path, path.with_name("changed.gguf"), keys=named)


def test_ollamas_files_agree(tmp_path) -> None:
    """They state the head's size under a key of their own alone."""
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config(head_dim=32), flavour="ollama")
    silent = changed(
        path,
        attention__key_length=None,
        attention__value_length=None,
        rope__dimension_count=None,
    )
    check_long_prompt(pair_of(silent, twin))


def test_what_a_file_leaves_out_is_as_published(tmp_path) -> None:
    """Prompts here are too short for chunks of 8,192 positions and for the temperature."""
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config(attention_chunk_size=8192, floor_scale=8192, attn_scale=0.1))
    silent = changed(
        path,
        attention__chunk_size=None,
        attention__floor_scale=None,
        attention__scale=None,
        attention__temperature_tuning=None,
        interleave_moe_layer_step=None,
        no_rope_interval=None,
        use_qk_norm=None,
    )
    check_long_prompt(pair_of(silent, twin))


def test_with_128_experts_a_silent_file_has_no_norms_of_queries_and_keys(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config(num_local_experts=128, use_qk_norm=False))
    check_long_prompt(pair_of(changed(path, use_qk_norm=None), twin))


def test_a_window_of_nought_means_no_chunks_and_turning_everywhere(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config())
    twin.config.layer_types = ["full_attention"] * SIZES["num_hidden_layers"]
    for layer in twin.model.layers:
        layer.self_attn.use_rope = True
        layer.self_attn.qk_norm = twin.model.layers[0].self_attn.qk_norm
    check_long_prompt(pair_of(changed(path, attention__sliding_window=0), twin))


@pytest.mark.parametrize(
    "key, value",
    [
        ("attention__chunk_size", 17),
        ("attention__floor_scale", 9),
        ("attention__scale", 0.4),
        ("attention__temperature_tuning", False),
        ("no_rope_interval", 3),
        ("use_qk_norm", False),
        ("rope__freq_base", 1000.0),
    ],
)
def test_every_key_shows_in_the_logits(tmp_path, key: str, value: object) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config())
    pair, tokens = pair_of(changed(path, **{key: value}), twin), random_tokens(PROMPT, seed=1)
    logits = PagedDecoder(pair.decoder).feed({0: tokens})
    assert pair.worst(logits, pair.expected(tokens)) > 10 * TOLERANCE

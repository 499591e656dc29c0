"""Logits of Gemma 4, the text model, against `transformers`, on tiny random models."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4TextConfig, Gemma4UnifiedTextConfig

from model_zoo.convert.convert import convert
from model_zoo.gguf.reader import GGUFFile
from runtime.errors import ModelFileError, UnsupportedModelError
from tests.gguf_files import matrices, rewrite
from tests.parity.agreement import (
    CHECKS,
    PROMPT,
    QUANTIZED_TYPES,
    TOLERANCE,
    Pair,
    check_quantized,
    load_decoder,
    make_pair,
    random_tokens,
)
from tests.parity.paged_decoder import PagedDecoder
from tests.tiny_models import tiny_tokenizer, write_tiny, write_tiny_folder

VOCABULARY = tiny_tokenizer().get_vocab_size()
LOCAL, GLOBAL = "sliding_attention", "full_attention"
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": [LOCAL, GLOBAL] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "sliding_window": 16,
    "final_logit_softcapping": 30.0,
}
# Bases that turn more within a short prompt than the usual ones.
TURNS = {
    GLOBAL: {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    LOCAL: {"rope_type": "default", "rope_theta": 100.0},
}
STRETCHED = TURNS | {GLOBAL: {**TURNS[GLOBAL], "partial_rotary_factor": 0.5, "factor": 8.0}}
WHOLLY = TURNS | {GLOBAL: {"rope_type": "default", "rope_theta": 500.0}}
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
INPUTS = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY}
SHARED = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}


def config(**changes) -> Gemma4TextConfig:
    plain = SIZES | {"rope_parameters": TURNS, "hidden_size_per_layer_input": 0}
    return Gemma4TextConfig(**(plain | changes))


def unified() -> Gemma4UnifiedTextConfig:
    return Gemma4UnifiedTextConfig(**SIZES, **KEYS_AS_VALUES, rope_parameters=TURNS)


CONFIGS = {
    "dense": config(**KEYS_AS_VALUES),
    "with_layer_inputs_and_shared_keys": config(**INPUTS, **SHARED),
    "with_experts": config(**EXPERTS, **KEYS_AS_VALUES),
    "all_at_once": config(**INPUTS, **SHARED, **EXPERTS, **KEYS_AS_VALUES),
    "unified": unified(),
    "values_everywhere": config(),
    "stretched": config(rope_parameters=STRETCHED),
    "wholly_turned": config(rope_parameters=WHOLLY),
    "usual_bases": config(rope_parameters=None),
    "window_of_one": config(sliding_window=1, **INPUTS, **SHARED),
    "uncapped_logits": config(final_logit_softcapping=None),
    "biases": config(attention_bias=True, **INPUTS, **SHARED),
}
LARGE = config(
    hidden_size=256,
    head_dim=64,
    global_head_dim=128,
    intermediate_size=256,
    hidden_size_per_layer_input=256,
    vocab_size_per_layer_input=VOCABULARY,
    **SHARED,
    **(EXPERTS | {"moe_intermediate_size": 256}),
)


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type)


def agrees(path: Path, twin) -> bool:
    pair = Pair(load_decoder(path), twin, VOCABULARY)
    tokens = random_tokens(PROMPT, seed=20)
    logits = PagedDecoder(pair.decoder).feed({0: tokens})
    return pair.worst(logits, pair.expected(tokens)) <= TOLERANCE


def changed(path: Path, tensors=None, **keys) -> Path:
    """A copy with other tensors and keys: `__` for a dot, without the architecture."""
    named = {f"gemma4.{name.replace('__', '.')}": value for name, value in keys.items()}
    named["general.architecture"] = "gemma4"
    return rewrite(path, path.with_name("changed.gguf"), keys=named, tensors=tensors)


def test_layers_with_a_window_and_others_have_caches_of_their_own_shapes(tmp_path) -> None:
    decoder = make_pair(config(**KEYS_AS_VALUES, **SHARED), tmp_path / "tiny.gguf").decoder
    shapes = [(cache.kv_heads, cache.key_dim, cache.value_dim) for cache in decoder.cache_layers]
    assert shapes == [(2, 8, 8), (1, 16, 16)]  # the other two layers share them


@pytest.mark.parametrize("name", ["with_layer_inputs_and_shared_keys", "with_experts"])
def test_files_of_ollamas_flavour_agree(tmp_path, name) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, CONFIGS[name], flavour="ollama")
    assert agrees(path, twin)


def test_gates_and_ups_apart_and_the_older_name_of_the_experts_scale_agree(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, CONFIGS["with_experts"])
    stored, tensors = matrices(path), {}
    for layer in range(SIZES["num_hidden_layers"]):
        names = [f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate_up", "gate", "up")]
        gate, up = np.split(stored[names[0]], 2, axis=1)
        tensors |= {names[0]: None, names[1]: gate.copy(), names[2]: up.copy()}
        scale = f"blk.{layer}.ffn_down_exps.scale"
        older = f"blk.{layer}.ffn_gate_inp.per_expert_scale"
        tensors |= {scale: None, older: stored[scale]}
    assert agrees(changed(path, tensors), twin)


def test_the_number_of_global_keys_may_be_stated_once(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config(**KEYS_AS_VALUES))
    keys = {"attention__head_count_kv": 2, "attention__global_head_count_kv": 1}
    assert agrees(changed(path, **keys), twin)


def test_what_a_file_leaves_out_is_as_published(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    usual = {"head_dim": 256, "global_head_dim": 512, "num_hidden_layers": 6, "layer_types": None}
    write_tiny(path, config(**usual, rope_parameters=None))
    left_out = """
        attention__layer_norm_rms_epsilon attention__key_length attention__value_length
        attention__key_length_swa attention__value_length_swa attention__sliding_window_pattern
        attention__shared_kv_layers rope__freq_base rope__freq_base_swa rope__dimension_count
        rope__dimension_count_swa embedding_length_per_layer_input
    """
    silent = changed(path, **dict.fromkeys(left_out.split()))
    tokens = random_tokens(PROMPT, seed=21)
    logits = [PagedDecoder(load_decoder(file)).feed({0: tokens}) for file in (path, silent)]
    assert torch.equal(*logits)


def test_layers_that_share_keys_may_have_unused_ones(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config(**INPUTS, **SHARED))
    unused = {"attn_k": (16, 64), "attn_v": (16, 64), "attn_k_norm": (8,)}
    tensors = {f"blk.2.{name}.weight": np.ones(size, "f4") for name, size in unused.items()}
    assert agrees(changed(path, tensors), twin)


def test_layers_without_a_scale_keep_theirs(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config())
    names = [f"blk.{layer}.layer_output_scale.weight" for layer in range(4)]
    unscaled = changed(path, dict.fromkeys(names))
    assert not agrees(unscaled, twin)
    for layer in twin.model.layers:
        layer.layer_scalar.fill_(1.0)
    assert agrees(unscaled, twin)


def test_tokens_beyond_the_table_of_layer_inputs_have_its_first_row(tmp_path) -> None:
    path, rows = tmp_path / "tiny.gguf", 100
    twin = write_tiny(path, config(**INPUTS))
    table = matrices(path)["per_layer_token_embd.weight"]
    twin.model.embed_tokens_per_layer.weight[rows:] = twin.model.embed_tokens_per_layer.weight[0]
    assert agrees(changed(path, {"per_layer_token_embd.weight": table[:rows].copy()}), twin)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"attention__shared_kv_layers": 4}, "shared_kv_layers` is 4; it must be below the 4"),
        ({"attention__shared_kv_layers": 3}, "shared_kv_layers` is 3; no layer before"),
        ({"attention__value_length": 8}, "value_length` .*is 8; it must be 16"),
        ({"attention__global_head_count_kv": 3}, "is 3, which does not divide the heads"),
        (
            {
                "attention__shared_kv_layers": 2,
                "attention__head_count": [4, 4, 3, 3],
                "attention__head_count_kv": [2, 2, 3, 3],
            },
            "shares 2 keys among 3 heads",
        ),
        ({"rope__dimension_count_swa": 7}, "dimension_count_swa` is 7; it must be even"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path, keys, words) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path, config())
    with pytest.raises(ModelFileError, match=words):
        load_decoder(changed(path, **keys))


def test_a_published_checkpoints_spellings_and_unused_tensors_convert(tmp_path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "tiny.gguf"
    twin = write_tiny_folder(folder, config(**INPUTS, **SHARED, **KEYS_AS_VALUES))
    settings = json.loads((folder / "config.json").read_text())
    del settings["per_layer_config"]
    published = {"global_head_dim": 16, "num_global_key_value_heads": 1}
    settings = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": settings | published,
        "vision_config": None,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    stored = load_file(folder / "model.safetensors")
    parts = {name.replace("model.", "model.language_model."): stored[name] for name in stored}
    unused = parts["model.language_model.layers.0.self_attn.k_proj.weight"].clone()
    parts["model.language_model.layers.2.self_attn.k_proj.weight"] = unused
    parts["model.vision_tower.std_scale"] = unused[0].clone()
    save_file(parts, folder / "model.safetensors")
    convert(folder, path, type="f32")
    assert "blk.2.attn_k.weight" not in GGUFFile.open(path).tensors
    assert agrees(path, twin)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_bidirectional_attention": "all"},
        {"rope_parameters": TURNS | {LOCAL: STRETCHED[GLOBAL]}},
    ],
)
def test_what_files_cannot_tell_is_not_converted(tmp_path, changes) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot tell"):
        write_tiny(tmp_path / "tiny.gguf", config(**changes))

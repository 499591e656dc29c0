"""Settings, as published, of models for which `transformers` has no class."""

from typing import Any

import pytest

from runtime.errors import ModelFileError, UnsupportedModelError
from tests.unit.model_zoo.convert.test_conversion_settings import told

SIZES: dict[str, Any] = {
    "hidden_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_hidden_layers": 3,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
ATTENDING = {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False}
ABSENT = {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False}
FFN = {"ffn_mult": 5.25, "no_op": False, "replace_with_linear": False}
NONE = {"ffn_mult": None, "no_op": True, "replace_with_linear": False}
NEMOTRON = SIZES | {
    "architectures": ["DeciLMForCausalLM"],
    "model_type": "nemotron-nas",
    "block_configs": [
        {"attention": ATTENDING, "ffn": FFN},
        {"attention": ABSENT | {"no_op": False, "replace_with_linear": True}, "ffn": FFN},
        {"attention": ABSENT, "ffn": NONE},
    ],
}
JAIS: dict[str, Any] = {
    "architectures": ["JAISLMHeadModel"],
    "activation_function": "swiglu",
    "layer_norm_epsilon": 1e-05,
    "model_type": "jais",
    "n_embd": 5120,
    "n_head": 40,
    "n_inner": 13653,
    "n_layer": 40,
    "n_positions": 2048,
    "position_embedding_type": "alibi",
    "scale_qk_dot_by_d": True,
    "vocab_size": 84992,
}


def test_layers_of_llama_nemotron_have_sizes_of_their_own(tmp_path) -> None:
    keys = told(tmp_path / "folder", NEMOTRON)
    assert list(keys["attention.head_count"]) == [64, 64, 0]
    assert list(keys["attention.head_count_kv"]) == [8, 0, 0]
    assert list(keys["feed_forward_length"]) == [28672, 28672, 0]


def test_scaling_of_decilm_applies_only_beyond_its_context(tmp_path) -> None:
    keys = told(
        tmp_path / "folder",
        SIZES
        | {
            "architectures": ["DeciLMForCausalLM"],
            "intermediate_size": 14336,
            "num_key_value_heads_per_layer": [4, 4, 1],
            "rope_scaling": {"factor": 2.0, "type": "dynamic"},
        },
    )
    assert list(keys["attention.head_count_kv"]) == [4, 4, 1]
    assert list(keys["feed_forward_length"]) == 3 * [14336]
    assert keys["rope.freq_base"] == 500000.0 and "rope.scaling.type" not in keys


@pytest.mark.parametrize(
    "block",
    [
        {"attention": ATTENDING | {"window_length": 1024}},
        {"ffn": FFN | {"replace_with_linear": True}},
    ],
)
def test_parts_that_files_cannot_express_are_refused(tmp_path, block) -> None:
    first = NEMOTRON["block_configs"][0] | block
    values = NEMOTRON | {"block_configs": [first, *NEMOTRON["block_configs"][1:]]}
    with pytest.raises(UnsupportedModelError, match="a window or with a matrix instead"):
        told(tmp_path / "folder", values)


def test_parts_of_another_number_of_layers_are_refused(tmp_path) -> None:
    with pytest.raises(ModelFileError, match="states 4 layers, and the parts of 3"):
        told(tmp_path / "folder", NEMOTRON | {"num_hidden_layers": 4})


def test_scores_of_jais_that_depend_on_the_length_are_refused(tmp_path) -> None:
    assert told(tmp_path / "plain", JAIS)["attention.max_alibi_bias"] == 8.0
    with pytest.raises(UnsupportedModelError, match="`alibi_scaling`"):
        told(tmp_path / "scaled", JAIS | {"alibi_scaling": {"type": "linear", "factor": 4.0}})


def test_the_context_of_qwen_1_is_that_of_training(tmp_path) -> None:
    qwen = SIZES | {
        "architectures": ["QWenLMHeadModel"],
        "intermediate_size": 22016,
        "kv_channels": 128,
        "layer_norm_epsilon": 1e-06,
        "max_position_embeddings": 32768,
        "rotary_emb_base": 10000,
        "seq_length": 8192,
    }
    keys = told(tmp_path / "qwen", qwen)
    assert (keys["context_length"], keys["feed_forward_length"]) == (8192, 22016)

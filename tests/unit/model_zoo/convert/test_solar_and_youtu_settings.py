"""Settings of Solar Open and Youtu as published, which their classes in `transformers` lack."""

from typing import Any

import pytest

from tests.unit.model_zoo.convert.test_conversion_settings import today, told

SOLAR_OPEN: dict[str, Any] = {
    "architectures": ["SolarOpenForCausalLM"],
    "model_type": "solar_open",
    "first_k_dense_replace": 0,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10240,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1280,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 196608,
}
YOUTU: dict[str, Any] = {
    "architectures": ["YoutuForCausalLM"],
    "model_type": "youtu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 16,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_theta": 1600000,
    "tie_word_embeddings": True,
    "v_head_dim": 128,
    "vocab_size": 128256,
}


@pytest.mark.parametrize("published", [SOLAR_OPEN, YOUTU], ids=["Solar Open", "Youtu"])
@pytest.mark.parametrize("flavour", ["llama.cpp", "ollama"])
def test_published_settings_are_read_as_transformers_reads_them(
    published, flavour, tmp_path
) -> None:
    keys = told(tmp_path / "published", published, flavour)
    expanded = today(published).to_dict() | {"architectures": published["architectures"]}
    assert keys == told(tmp_path / "today", expanded, flavour)


def test_no_layer_of_solar_open_and_every_layer_of_youtu_is_dense(tmp_path) -> None:
    solar, youtu = (
        told(tmp_path / name, values) for name, values in (("s", SOLAR_OPEN), ("y", YOUTU))
    )
    assert solar["leading_dense_block_count"] == 0 and solar["rope.dimension_count"] == 128
    assert solar["rope.scaling.type"] == "yarn" and solar["rope.scaling.factor"] == 2.0
    assert youtu["leading_dense_block_count"] == 32 and "expert_count" not in youtu

"""Settings of Step 3.5 as published, which list those of layers for drafting tokens as well."""

from typing import Any

import pytest
import torch

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.convert_folder import conversion_for
from runtime.errors import ModelFileError, UnsupportedModelError
from tests.unit.model_zoo.convert.test_conversion_settings import told

FAR, NEAR = "full_attention", "sliding_attention"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 32.0,
    "original_max_position_embeddings": 131072,
}
BOTH: dict[str, Any] = {
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 1280,
    "moe_router_scaling_factor": 3.0,
    "num_attention_heads": 64,
    "num_hidden_layers": 45,
    "rms_norm_eps": 1e-05,
    "share_expert_dim": 1280,
    "sliding_window": 512,
    "vocab_size": 128896,
}
PUBLISHED = BOTH | {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8},
    "layer_types": ([FAR, NEAR, NEAR, NEAR] * 12),
    "moe_layers_enum": ",".join(map(str, range(3, 45))),
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "norm_expert_weight": True,
    "num_attention_groups": 8,
    "num_nextn_predict_layers": 3,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
    "rope_scaling": LLAMA3,
    "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0] * 12,
    "swiglu_limits": [0.0] * 43 + [7, 7] + [0.0] * 3,
    "swiglu_limits_shared": [0.0] * 44 + [16] + [0.0] * 3,
    "use_head_wise_attn_gate": True,
    "yarn_only_types": [FAR],
}
# As `transformers` states them, as those of the text model of Step 3.7.
TODAY = {
    "architectures": ["Step3p7ForConditionalGeneration"],
    "model_type": "step3p7",
    "text_config": BOTH
    | {
        "model_type": "step3p5",
        "layer_types": PUBLISHED["layer_types"][:45],
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "num_sliding_attention_heads": 96,
        "rope_parameters": {
            FAR: LLAMA3 | {"rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
            NEAR: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
        "swiglu_limits": [None] * 43 + [7, 7],
        "swiglu_limits_shared": [None] * 44 + [16],
    },
}


def factors(values: dict[str, Any], tmp_path: Any) -> torch.Tensor:
    config = Configuration(values, path=tmp_path / "config.json")
    table = conversion_for(config)
    config = config.of_family(defaults=table.defaults, spellings=table.spellings)
    made = table.computed[0].make(config)
    assert made is not None
    return made


def test_published_settings_mean_those_of_transformers(tmp_path) -> None:
    keys = told(tmp_path / "published", PUBLISHED)
    assert keys == told(tmp_path / "today", TODAY)
    assert keys["attention.head_count"] == ([64, 96, 96, 96] * 12)[:45]
    assert keys["swiglu_clamp_exp"] == [0.0] * 43 + [7.0, 7.0]
    assert (keys["rope.freq_base"], keys["rope.freq_base_swa"]) == (5e6, 1e4)
    assert keys["leading_dense_block_count"] == 3
    published = factors(PUBLISHED, tmp_path)
    assert torch.equal(published, factors(TODAY, tmp_path)) and len(published) == 64


@pytest.mark.parametrize(
    "changes",
    [
        {"partial_rotary_factors": [1.0] * 48},
        {"rope_scaling": LLAMA3 | {"rope_type": "yarn"}},
        {"use_head_wise_attn_gate": False},
        {"moe_router_activation": "softmax"},
    ],
)
def test_settings_that_files_cannot_express_are_refused(changes, tmp_path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"has|layers of the kind {FAR}"):
        told(tmp_path / "folder", PUBLISHED | changes)


def test_lists_for_fewer_layers_are_refused(tmp_path) -> None:
    with pytest.raises(ModelFileError, match="has 44 `layer_types` for 45 layers"):
        told(tmp_path / "folder", PUBLISHED | {"layer_types": [FAR] * 44})

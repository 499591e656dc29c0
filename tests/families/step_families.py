"""The row of Step 3.5, which `transformers` has as the text model of Step 3.7."""

from typing import Any

from transformers import Step3p7Config

from tests.families.text_family import LLAMA3_ROPE, SIZES, CompleteFile, TextFamily

VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "mlp_ratio": 1.0,
}
FAR, NEAR = "full_attention", "sliding_attention"
FAR_ROPE = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
NEAR_ROPE = {"rope_type": "default", "rope_theta": 1e4}
STEP = SIZES | {
    "num_hidden_layers": 4,
    "num_sliding_attention_heads": 6,
    "head_dim": 32,
    "sliding_window": 9,
    "layer_types": [FAR, NEAR, NEAR, FAR],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "share_expert_dim": 48,
    "rope_parameters": {FAR: FAR_ROPE, NEAR: NEAR_ROPE},
}
BOUNDS = {
    "swiglu_limits": [0, 0.004, None, 0.002],
    "swiglu_limits_shared": [0.003, 0, 0.002, None],
}


def with_pictures(**text: Any) -> Step3p7Config:
    return Step3p7Config(text_config=text, vision_config=VISION, image_token_id=10)


STEP35 = TextFamily(
    with_pictures,
    STEP,
    {
        "plain": BOUNDS | {"moe_router_scaling_factor": 3.0},
        "scaled_rotation": {
            "layer_types": [NEAR, FAR, FAR, NEAR],
            "num_sliding_attention_heads": 2,
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "rope_parameters": {
                FAR: FAR_ROPE | LLAMA3_ROPE | {"high_freq_factor": 32.0},
                NEAR: NEAR_ROPE,
            },
        },
    },
    wide={
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "share_expert_dim": 256,
        "head_dim": 64,
    },
    effective_keys={
        "attention.sliding_window": 10,
        "attention.sliding_window_pattern": [True, False, False, True],
        "expert_weights_norm": False,
        "rope.freq_base_swa": 100.0,
        "swiglu_clamp_exp": [0.0] * 4,
        "swiglu_clamp_shexp": [0.0] * 4,
    },
    refused=(
        ({"swiglu_clamp_exp": [0.5]}, "has no bound of 0 or more for layer 0"),
        ({"swiglu_clamp_shexp": [-1.0] * 4}, "has no bound of 0 or more for layer 0"),
        ({"rope.dimension_count": 16}, "is 16; it must be 32, a multiple of 4"),
    ),
    files=(
        CompleteFile(
            optional_keys="""
                expert_feed_forward_length expert_gating_func expert_weights_norm
                expert_weights_scale leading_dense_block_count swiglu_clamp_exp
                swiglu_clamp_shexp
            """
        ),
    ),
)

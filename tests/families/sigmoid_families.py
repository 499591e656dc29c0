"""The rows of models whose experts have sigmoids as scores in the table of text families."""

from collections.abc import Mapping
from typing import Any

from transformers import (
    AfmoeConfig,
    Dots1Config,
    Glm4MoeConfig,
    HYV3Config,
    LagunaConfig,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    MiniMaxM3VLConfig,
    MiniMaxM3VLTextConfig,
    SolarOpenConfig,
)

from tests.families.step_families import STEP35
from tests.families.text_family import (
    SIZES,
    TIED,
    WIDE_HEADS,
    YARN,
    CompleteFile,
    TextFamily,
    Variant,
    rope,
)

LEADING_DENSE = SIZES | {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
}
SOLAR_LACKS = ("first_k_dense_replace", "intermediate_size")
SOLAR_OPEN = {key: value for key, value in LEADING_DENSE.items() if key not in SOLAR_LACKS}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}

MINIMAX_M3_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def minimax_m3(**settings: Any) -> MiniMaxM3VLConfig:
    """As published: the text model alone has other names of tensors."""
    return MiniMaxM3VLConfig(
        text_config=MiniMaxM3VLTextConfig(**settings),
        vision_config=MINIMAX_M3_VISION,
        projector_hidden_size=16,
    )


FAMILIES: Mapping[str, TextFamily] = {
    "afmoe": TextFamily(
        AfmoeConfig,
        SIZES
        | rope(10000.0)
        | {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "num_dense_layers": 1,
            "moe_intermediate_size": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "route_scale": 2.5,
            "sliding_window": 9,
            "mup_enabled": True,
        },
        {"plain": {}, "tied_with_one_key_head": TIED | {"num_key_value_heads": 1}},
        wide=WIDE_HEADS | {"moe_intermediate_size": 256},
        effective_keys={
            "attention.sliding_window": 10,
            "attention.sliding_window_pattern": 2,
            "expert_weights_norm": False,
        },
        files=(
            CompleteFile(
                optional_keys="""
                    expert_gating_func expert_group_count expert_group_used_count
                    expert_weights_norm expert_weights_scale
                """
            ),
        ),
    ),
    "dots1": TextFamily(
        Dots1Config,
        LEADING_DENSE | rope(1e7) | {"n_group": 1, "sliding_window": None},
        {
            "plain": {"norm_topk_prob": True},
            "groups_with_biases": {
                "n_group": 2,
                "topk_group": 1,
                "routed_scaling_factor": 2.5,
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
        },
        wide=WIDE_HEADS | {"moe_intermediate_size": 256},
        files=(
            CompleteFile(
                optional_keys="""
                    expert_gating_func expert_weights_norm expert_weights_scale
                    expert_group_count expert_group_used_count
                """
            ),
        ),
    ),
    "glm4moe": TextFamily(
        Glm4MoeConfig,
        LEADING_DENSE | {"num_mtp_layers": 0},
        {
            "plain": {"use_qk_norm": True},
            "groups_without_head_norms": {
                "n_group": 2,
                "norm_topk_prob": False,
                "routed_scaling_factor": 2.5,
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
            "solar_open": SolarOpenConfig(**(SOLAR_OPEN | YARN)),
        },
        wide=WIDE_HEADS | {"moe_intermediate_size": 256},
        files=(
            CompleteFile(
                optional_keys="""
                    expert_gating_func expert_weights_norm expert_weights_scale
                    expert_group_count expert_group_used_count
                """
            ),
        ),
    ),
    "hy_v3": TextFamily(
        HYV3Config,
        SIZES
        | rope(1e6)
        | {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
        },
        {
            "plain": {},
            "tied_with_two_shared_experts": TIED
            | {"num_shared_experts": 2, "mlp_layer_types": ["dense", "dense", "sparse"]},
        },
        wide=WIDE_HEADS | {"moe_intermediate_size": 256},
        # For files that state neither the width of shared experts nor the number of dense layers.
        variants={
            "first_files": Variant(
                architecture="hy-v3",
                keys={
                    "expert_shared_count": None,
                    "expert_shared_feed_forward_length": None,
                    "leading_dense_block_count": None,
                },
            )
        },
        effective_keys={"expert_weights_norm": False, "expert_weights_scale": 1.5},
        files=(
            CompleteFile(
                optional_keys="""
                    expert_gating_func expert_shared_count expert_shared_feed_forward_length
                    expert_weights_norm expert_weights_scale leading_dense_block_count
                """,
                optional_tensors="blk.1.exp_probs_b blk.2.exp_probs_b",
            ),
        ),
    ),
    "laguna": TextFamily(
        LagunaConfig,
        SIZES
        | {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "num_attention_heads_per_layer": [4, 6, 6, 6],
            "sliding_window": 9,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "moe_routed_scaling_factor": 2.5,
        },
        {
            "plain": {},
            "gates_of_elements_without_windows": {
                "num_hidden_layers": 3,
                "layer_types": ["full_attention"] * 3,
                "num_attention_heads_per_layer": None,
                "mlp_layer_types": ["dense", "dense", "sparse"],
                "gating": "per-element",
            },
            "yarn": {
                "rope_parameters": {
                    "full_attention": YARN["rope_parameters"] | {"partial_rotary_factor": 0.5},
                    "sliding_attention": {
                        "rope_type": "default",
                        "rope_theta": 500.0,
                        "partial_rotary_factor": 0.75,
                    },
                },
            },
            "window_in_the_first_layer": {"layer_types": ["sliding_attention"] * 4},
        },
        effective_keys={
            "attention.sliding_window": 10,
            "attention.sliding_window_pattern": 2,
            "expert_weights_norm": False,
            "rope.dimension_count_swa": 16,
            "rope.freq_base_swa": 500.0,
        },
        refused=(({"rope.dimension_count_swa": 17}, "is 17; it must be even"),),
        wide=WIDE_HEADS | {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.sliding_window expert_feed_forward_length expert_gating_func
                    expert_weights_norm expert_weights_scale rope.dimension_count_swa
                    rope.freq_base_swa
                """,
                optional_tensors=" ".join(f"blk.{n}.exp_probs_b.bias" for n in (1, 2, 3)),
            ),
        ),
    ),
    "mimo2": TextFamily(
        MiMoV2FlashConfig,
        SIZES
        | {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "head_dim": 32,
            "v_head_dim": 24,
            "num_key_value_heads": 1,
            "sliding_window": 9,
            "rope_parameters": {
                kind: {
                    "rope_type": "default",
                    "rope_theta": theta,
                    "partial_rotary_factor": 0.375,
                }
                for kind, theta in (("full_attention", 5e6), ("sliding_attention", 500.0))
            },
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        {
            "plain": {},
            "biases_without_dense_layer": {
                "attention_bias": True,
                "attention_value_scale": None,
                "mlp_layer_types": ["sparse"] * 3,
            },
        },
        wide=WIDE_HEADS | {"v_head_dim": 64, "moe_intermediate_size": 256},
        effective_keys={
            "attention.sliding_window": 10,
            "attention.value_scale": 0.5,
            "rope.dimension_count": 8,
            "rope.freq_base_swa": 100.0,
            "expert_weights_norm": False,
        },
        files=(
            CompleteFile(
                optional_keys="""
                    attention.value_scale expert_gating_func expert_group_count
                    expert_group_used_count expert_weights_norm
                    expert_weights_scale rope.freq_base_swa
                """,
                optional_tensors="blk.1.attn_sinks.weight",
            ),
        ),
    ),
    "minimax-m2": TextFamily(
        MiniMaxM2Config,
        SIZES | rope(5e6, partial_rotary_factor=0.5) | {"head_dim": 32} | EXPERTS,
        {
            "plain": {},
            "whole_heads_rotated": rope(5e6),
            "one_expert_per_token": {"num_experts_per_tok": 1},
            "tied_with_as_many_kv_heads_as_heads": TIED | {"num_key_value_heads": 4},
        },
        wide=WIDE_HEADS,
        divided=None,
        effective_keys={"rope.dimension_count": 8, "expert_weights_norm": False},
        files=(CompleteFile(optional_keys="expert_gating_func feed_forward_length"),),
    ),
    "minimax-m3": TextFamily(
        minimax_m3,
        SIZES
        | rope(5e6, partial_rotary_factor=0.5)
        | EXPERTS
        | {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "rotary_dim": 16,
            "intermediate_size": 32,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 64,
            "swiglu_limit": 7.0,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["full_attention", *["minimax_m3_sparse"] * 2],
            # Rows attend to fewer tokens than prompts have.
            "index_n_heads": 2,
            "index_head_dim": 24,
            "index_block_size": 3,
            "index_topk_blocks": 2,
        },
        {
            "plain": {},
            "all_tokens": {"index_block_size": 128},
            "no_local_block": {
                "index_n_heads": 4,
                "num_key_value_heads": 4,
                "index_block_size": 4,
                "index_local_blocks": 0,
            },
            "one_shared_expert_everywhere": {
                "mlp_layer_types": ["sparse"] * 3,
                "shared_intermediate_size": 32,
                "num_key_value_heads": 1,
                "index_n_heads": 1,
                "index_block_size": 1,
                "index_topk_blocks": 7,
                "index_local_blocks": 2,
            },
        },
        wide=WIDE_HEADS
        | {"index_head_dim": 64, "dense_intermediate_size": 256, "shared_intermediate_size": 256},
        effective_keys={
            "rope.dimension_count": 8,
            "expert_weights_norm": False,
            "expert_weights_scale": 1.5,
            "attention.indexer.top_k": 1,
            "attention.indexer.block_size": 2,
            "attention.indexer.local_blocks": 0,
        },
        files=(
            CompleteFile(
                optional_keys="expert_gating_func expert_weights_norm expert_weights_scale"
            ),
        ),
        refused=(
            ({"attention.indexer.head_count": 1}, "there are 2 key/value heads"),
            ({"attention.indexer.local_blocks": 3}, "2 blocks of 3 tokens are chosen"),
            ({"attention.indexer.key_length": 8}, "16 elements are rotated"),
        ),
    ),
    "step35": STEP35,
}

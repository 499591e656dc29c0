"""The rows of the Qwen models in the table of text families."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import (
    MellumConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen4ExpTextConfig,
)
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen4_exp import modeling_qwen4_exp

from tests.families.delta_rule import EPS
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

# Mellum 2, whose layers with a window have no rope scaling.
MELLUM_YARN = {
    "full_attention": YARN["rope_parameters"] | {"attention_factor": 1.3},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
# Qwen 3 Next and Qwen 3.5.
DELTA_RULE = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rms_norm_eps": EPS,
}
SHARED_EXPERT = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
RECURRENT_LAST = {"num_hidden_layers": 3, "full_attention_interval": 2}
QWEN35_ROPE = rope(
    10000.0, partial_rotary_factor=0.5, mrope_section=[4, 2, 2], mrope_interleaved=True
)
# Those of the published models, longer than these models need.
LONG_SECTIONS = rope(
    10000.0, partial_rotary_factor=0.5, mrope_section=[11, 11, 10], mrope_interleaved=True
)
QWEN35 = SIZES | DELTA_RULE | QWEN35_ROPE
# As of the published models, and as llama.cpp needs them.
SQUARE_STATES = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
QWEN35_EXPERTS = {k: v for k, v in QWEN35.items() if k != "intermediate_size"} | SHARED_EXPERT
QWEN4 = QWEN35_EXPERTS | {
    "hc_count": 4,
    "hc_lowrank": 24,
    "output_gate_type": "sigmoid",
    "eos_token_id": 1,
    "ple_layer_ids": [2],
    "ple_embed_dim": 64,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 4,
    "heads_per_ngram": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 512,
    "indexer_compress_ratio": 4,
}
QWEN35_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
WIDE_DELTA_RULE = {
    "hidden_size": 256,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
}
WIDE_EXPERTS = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}


def with_drafts(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Matrices of a layer for drafts, as Ollama's published files name them."""
    names = "fc", "norm", "pre_fc_norm_hidden", "layers.0.attn_q", "layers.0.post_attention_norm"
    return {f"mtp.{name}.weight": tensors["output_norm.weight"] for name in names}


def qwen35_with_vision(make: type, text: PreTrainedConfig) -> PreTrainedConfig:
    return make(text_config=text.to_dict(), vision_config=QWEN35_VISION)


def qwen25vl(sections: tuple[int, ...] = (2, 3, 3), theta: float = 1e6, **text: Any):
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": [1],
    }
    tied = text.get("tie_word_embeddings", False)
    text |= rope(theta, mrope_section=list(sections))
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)


def qwen3vl(make: type = Qwen3VLConfig, sections: tuple[int, ...] = (3, 3, 2), **text: Any):
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "depth": 1,
        "num_heads": 2,
        "patch_size": 4,
        "num_position_embeddings": 4,
        "deepstack_visual_indexes": [0],
        "out_hidden_size": text["hidden_size"],
    }
    text = {"tie_word_embeddings": False} | text | rope(5e6, mrope_section=list(sections))
    tied = text["tie_word_embeddings"]
    return make(text_config=text, vision_config=vision, tie_word_embeddings=tied)


FAMILIES: Mapping[str, TextFamily] = {
    "qwen2": TextFamily(
        Qwen2Config,
        SIZES | {"use_sliding_window": False},
        {"plain": rope(1e6), "tied": TIED, "yarn": YARN},
        divided="tied",
        files=(CompleteFile(optional_keys="attention.key_length attention.value_length"),),
    ),
    "qwen25vl": TextFamily(
        qwen25vl,
        SIZES,
        {"plain": {}, "tied": TIED, "other_rope_base": {"theta": 1e4}},
        wide={"hidden_size": 256, "intermediate_size": 256, "sections": (8, 12, 12)},
        refused=[
            ({"rope.dimension_sections": sections}, "dimension_sections")
            for sections in ([2, 3], [2, 3, 4], [2, 3, 3, 1], [-2, 5, 5, 0], [0])
        ],
        files=(
            CompleteFile(
                optional_keys="rope.freq_base attention.key_length attention.value_length"
            ),
        ),
    ),
    "qwen2moe": TextFamily(
        Qwen2MoeConfig,
        SIZES | SHARED_EXPERT | rope(1e6),
        {"plain": {}, "tied_and_renormalised": TIED | YARN | {"norm_topk_prob": True}},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length expert_weights_norm
                    expert_feed_forward_length feed_forward_length
                """
            ),
        ),
    ),
    "qwen3": TextFamily(
        Qwen3Config,
        SIZES | rope(1e6) | {"head_dim": 32},
        {
            "plain": {},
            "tied": TIED | {"head_dim": 16},
            "biases": {"attention_bias": True},
            "yarn": YARN,
        },
        wide=WIDE_HEADS,
        divided="biases",
        files=(CompleteFile("yarn", optional_keys="rope.scaling.original_context_length"),),
    ),
    "mellum": TextFamily(
        MellumConfig,
        SIZES
        | {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "sliding_window": 9,
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
        {
            "plain": {},
            "yarn_without_windows": {
                "num_hidden_layers": 2,
                "layer_types": ["full_attention"] * 2,
                "sliding_window": None,
                "rope_parameters": MELLUM_YARN,
            },
            "yarn": {"rope_parameters": MELLUM_YARN},
        },
        variants={
            # As llama.cpp reads files that lack these keys.
            "unstated_pattern": Variant(
                {"layer_types": [*["sliding_attention"] * 3, "full_attention"]},
                keys={"attention.sliding_window_pattern": None},
            )
        },
        effective_keys={
            "attention.sliding_window": 10,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base_swa": 500.0,
        },
        wide=WIDE_HEADS | {"moe_intermediate_size": 256},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.sliding_window attention.sliding_window_pattern
                    expert_feed_forward_length feed_forward_length rope.freq_base_swa
                """
            ),
        ),
    ),
    "qwen3moe": TextFamily(
        Qwen3MoeConfig,
        SIZES
        | {
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
        {
            "plain": {},
            "expert_weights_not_normalized": {"norm_topk_prob": False},
            "all_experts_per_token": {"num_experts_per_tok": 8},
            "many_experts": {"num_experts": 100, "num_experts_per_tok": 8},
            "tied": TIED,
            "yarn": YARN,
        },
        wide={"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256},
        variants={
            name: Variant(
                keys={
                    "norm_top_k_prob": None,
                    "expert_weights_norm": None,
                    "expert_feed_forward_length": width,
                }
            )
            for name, width in (("no_norm_keys", 32), ("no_norm_keys_and_no_width", None))
        },
        files=(
            CompleteFile(
                optional_keys="""
                    feed_forward_length expert_feed_forward_length expert_weights_norm
                    norm_top_k_prob
                """
            ),
        ),
    ),
    "qwen3next": TextFamily(
        Qwen3NextConfig,
        SIZES | DELTA_RULE | SHARED_EXPERT,
        {
            "plain": {},
            "recurrent_last_layer": RECURRENT_LAST,
            "one_value_head_per_key_head": {"linear_num_key_heads": 6},
            "expert_weights_not_normalized": {"norm_topk_prob": False},
            "wide_convolution": {"linear_conv_kernel_dim": 7},
            "tied": TIED,
        },
        wide=WIDE_DELTA_RULE | WIDE_EXPERTS,
        delta_rule=(modeling_qwen3_next,),
        files=(
            CompleteFile(
                optional_keys="""
                    full_attention_interval feed_forward_length expert_feed_forward_length
                    expert_weights_norm expert_shared_feed_forward_length
                """
            ),
        ),
    ),
    "qwen35": TextFamily(
        Qwen3_5TextConfig,
        QWEN35,
        {
            "plain": {},
            "recurrent_last_layer": RECURRENT_LAST,
            "one_value_head_per_key_head": {"linear_num_key_heads": 6},
            "tied": TIED,
            "text_of_a_vision_model": qwen35_with_vision(
                Qwen3_5Config, Qwen3_5TextConfig(**QWEN35)
            ),
        },
        wide=WIDE_DELTA_RULE | LONG_SECTIONS | {"intermediate_size": 512},
        variants={
            "ollama": Variant(flavour="ollama", tensors=with_drafts),
            "no_experts_stated": Variant(keys={"expert_count": 0}),
        },
        delta_rule=(modeling_qwen3_5,),
        files=(CompleteFile(optional_keys="full_attention_interval rope.dimension_sections"),),
    ),
    "qwen35moe": TextFamily(
        Qwen3_5MoeTextConfig,
        QWEN35_EXPERTS,
        {
            "plain": {},
            "experts_in_wide_rows": {"linear_value_head_dim": 80, "num_experts_per_tok": 8},
            "text_of_a_vision_model": qwen35_with_vision(
                Qwen3_5MoeConfig, Qwen3_5MoeTextConfig(**QWEN35_EXPERTS)
            ),
        },
        wide=WIDE_DELTA_RULE | WIDE_EXPERTS | LONG_SECTIONS,
        variants={"ollama": Variant(flavour="ollama", tensors=with_drafts)},
        delta_rule=(modeling_qwen3_5_moe,),
        files=(
            CompleteFile(
                optional_keys="""
                    full_attention_interval rope.dimension_sections expert_feed_forward_length
                    expert_shared_feed_forward_length
                """
            ),
        ),
    ),
    "qwen4exp": TextFamily(
        Qwen4ExpTextConfig,
        QWEN4,
        {
            "plain": {},
            "without_ngrams": {"ple_layer_ids": None},
            "longer_ngrams": {
                "ngram_size": 4,
                "ple_embed_dim": 48,
                "ple_conv_kernel_size": 2,
                "hc_count": 2,
            },
        },
        wide=WIDE_DELTA_RULE | WIDE_EXPERTS | LONG_SECTIONS | {"hc_lowrank": 256},
        delta_rule=(modeling_qwen4_exp,),
        effective_keys={"ple.layer_multipliers": [3, 5, 7], "ple.eos_token_id": 260},
        refused=(
            ({"hyper_connection.count": 1}, "it must be 2 or more"),
            ({"ple.layers": [3]}, "not one recurrent layer"),
            ({"ple.ngram_size": 1}, "it must be 2 or more"),
            ({"ple.eos_token_id": 1 << 20}, "there are 321 tokens"),
            ({"ple.head_offsets": [0] * 7 + [1 << 20]}, "rows of a table of 548"),
            ({"ple.head_vocab_sizes": [53]}, "8 are needed"),
            ({"attention.compress_ratios": [0, 0, 0, 3]}, "does not divide 512 tokens"),
        ),
        files=(
            CompleteFile(
                optional_keys="""
                    full_attention_interval rope.dimension_sections expert_feed_forward_length
                """
            ),
        ),
    ),
    # With as many heads, no block has a score of 0, of which `topk` of torch chooses any.
    "qwen4exp_with_choice": TextFamily(
        Qwen4ExpTextConfig,
        QWEN4 | {"indexer_budget": 16, "indexer_n_heads": 8},
        {
            "plain": {},
            "wide_blocks": {"indexer_compress_ratio": 8},
        },
        wide=None,
        divided=None,
        delta_rule=(modeling_qwen4_exp,),
        files=(),
        effective_keys={"attention.indexer.top_k": 8},
    ),
    "qwen3vl": TextFamily(
        qwen3vl,
        SIZES | {"head_dim": 16},
        {"plain": {}, "tied": TIED},
        wide=WIDE_HEADS | {"sections": (12, 10, 10)},
        files=(),
    ),
    "qwen3vlmoe": TextFamily(
        qwen3vl,
        SIZES
        | {
            "make": Qwen3VLMoeConfig,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
        {"plain": {}},
        wide=None,
        files=(),
    ),
}

"""The rows of models with layers without rotation in the table of text families."""

from collections.abc import Mapping

from transformers import (
    Cohere2Config,
    Cohere2MoeConfig,
    Exaone4_5_Config,
    Exaone4Config,
    ExaoneMoeConfig,
    SmolLM3Config,
)

from tests.families.text_family import (
    LLAMA3_ROPE,
    SIZES,
    TIED,
    WIDE_HEADS,
    YARN,
    CompleteFile,
    TextFamily,
    rope,
)

FAR, NEAR = "full_attention", "sliding_attention"
EXAONE4 = SIZES | rope(1e6) | {"num_hidden_layers": 4, "sliding_window": 9}
EXAONE4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "num_key_value_heads": 1,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
}

FAMILIES: Mapping[str, TextFamily] = {
    "cohere2": TextFamily(
        Cohere2Config,
        SIZES | rope(5e4) | {"num_hidden_layers": 4, "sliding_window": 9, "pad_token_id": None},
        {
            "plain": {},
            "every_other_layer_full_with_biases": {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "attention_bias": True,
                "logit_scale": 3.0,
            },
        },
        effective_keys={
            "attention.sliding_window": 10,
            "attention.sliding_window_pattern": 2,
            "logit_scale": 0.1,
        },
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length attention.layer_norm_epsilon
                    logit_scale
                """
            ),
        ),
    ),
    "cohere2moe": TextFamily(
        Cohere2MoeConfig,
        SIZES
        | rope(5e4)
        | {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 9,
            "pad_token_id": None,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "expert_selection_fn": "sigmoid",
        },
        {
            "plain": {
                "num_shared_experts": 2,
                "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
                "layer_types": [FAR, NEAR, FAR, NEAR],
                "prefix_dense_intermediate_size": 48,
                "rms_norm_eps": 1e-5,
            },
            "layer_norms_without_shared_expert": {"norm_topk_prob": False, "logit_scale": 0.5},
        },
        effective_keys={
            "attention.sliding_window": 10,
            "attention.sliding_window_pattern": [True, True, False, True],
            "expert_weights_norm": False,
            "logit_scale": 0.1,
        },
        refused=(
            ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon` is missing"),
        ),
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length expert_feed_forward_length
                    expert_gating_func expert_weights_norm expert_shared_count
                    expert_shared_feed_forward_length logit_scale
                """
            ),
        ),
    ),
    "exaone4": TextFamily(
        Exaone4Config,
        EXAONE4,
        {
            "plain": {},
            "text_of_a_vision_model": Exaone4_5_Config(
                text_config=EXAONE4 | {"model_type": "exaone4"}, vision_config=EXAONE4_VISION
            ),
            "window_of_no_layer": {"layer_types": ["full_attention"] * 4},
            "tied_without_windows": TIED
            | {
                "num_hidden_layers": 2,
                "sliding_window": None,
                "layer_types": ["full_attention"] * 2,
                "rope_parameters": LLAMA3_ROPE,
            },
        },
        effective_keys={
            "attention.sliding_window": 10,
            "attention.sliding_window_pattern": 2,
        },
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length attention.sliding_window
                    attention.sliding_window_pattern
                """
            ),
        ),
    ),
    "exaone-moe": TextFamily(
        ExaoneMoeConfig,
        SIZES
        | rope(1e6)
        | {
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
        {
            "plain": {},
            "groups_and_two_dense_layers": TIED
            | {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "first_k_dense_replace": 2,
                "n_group": 2,
                "norm_topk_prob": False,
                "num_shared_experts": 2,
                "rope_parameters": LLAMA3_ROPE,
            },
        },
        wide=WIDE_HEADS | {"moe_intermediate_size": 256},
        effective_keys={
            "attention.sliding_window": 10,
            "attention.sliding_window_pattern": 2,
        },
        files=(
            CompleteFile(
                optional_keys="""
                    attention.sliding_window_pattern expert_feed_forward_length
                    expert_gating_func expert_group_count expert_group_used_count
                    expert_shared_count expert_shared_feed_forward_length expert_weights_norm
                    expert_weights_scale
                """
            ),
        ),
    ),
    "smollm3": TextFamily(
        SmolLM3Config,
        SIZES | rope(5e6) | {"num_hidden_layers": 4, "pad_token_id": None},
        {
            "plain": {"tie_word_embeddings": False},
            "tied_with_biases_and_yarn": YARN | {"attention_bias": True},
        },
        files=(CompleteFile(optional_keys="attention.key_length attention.value_length"),),
    ),
}

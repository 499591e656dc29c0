"""The rows of the LFM2 models in the table of text families."""

from collections.abc import Mapping

from transformers import Lfm2Config, Lfm2MoeConfig

from tests.families.text_family import SIZES, WIDE, CompleteFile, TextFamily, Variant, rope

CONVOLUTION, ATTENTION = "conv", "full_attention"
LAYERS = (
    SIZES
    | rope(1e6)
    | {
        "num_hidden_layers": 4,
        "layer_types": [CONVOLUTION, CONVOLUTION, ATTENTION, CONVOLUTION],
    }
)
EXPERTS = {
    "num_dense_layers": 1,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}

FAMILIES: Mapping[str, TextFamily] = {
    "lfm2": TextFamily(
        Lfm2Config,
        LAYERS | {"block_multiple_of": 32},
        {
            "plain": {},
            "attention_last": {"num_hidden_layers": 2, "layer_types": [CONVOLUTION, ATTENTION]},
            "wide_convolution": {"conv_L_cache": 7},
            "stated_width_and_own_head": {
                "block_auto_adjust_ff_dim": False,
                "tie_word_embeddings": False,
            },
            "multiplied_width": {"block_ffn_dim_multiplier": 1.3},
            "attention_everywhere": {"layer_types": None},
        },
        wide=WIDE | {"block_auto_adjust_ff_dim": False},
        refused=[
            ({"shortconv.l_cache": 1}, "l_cache"),
            ({"attention.head_count_kv": [0] * 4}, "head_count_kv"),
        ],
        files=(
            CompleteFile(
                optional_keys="attention.key_length attention.value_length feed_forward_length"
            ),
        ),
        variants={"ollama": Variant(flavour="ollama", keys={"feed_forward_length": 96})},
    ),
    "lfm2moe": TextFamily(
        Lfm2MoeConfig,
        LAYERS | EXPERTS,
        {
            "plain": {},
            "scores_neither_biased_nor_renormalised": {
                "use_expert_bias": False,
                "norm_topk_prob": False,
                "routed_scaling_factor": 2.5,
                "tie_word_embeddings": False,
            },
        },
        wide=WIDE | {"moe_intermediate_size": 256},
        variants={
            "ollama": Variant(
                flavour="ollama",
                keys=dict.fromkeys(("expert_weights_norm", "expert_weights_scale")),
            )
        },
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length expert_gating_func
                    expert_weights_norm expert_weights_scale
                """
            ),
        ),
    ),
}

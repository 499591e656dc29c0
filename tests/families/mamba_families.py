"""The rows of models with Mamba 2 layers in the table of text families."""

from collections.abc import Mapping

from transformers import GraniteMoeHybridConfig

from tests.families.text_family import SIZES, TIED, WIDE, CompleteFile, TextFamily, rope

MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.125,
}
# Chunks of `transformers` are shorter than the prompts.
GRANITE_HYBRID = (
    SIZES
    | rope(10000.0)
    | MULTIPLIERS
    | {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_chunk_size": 32,
    }
)
GRANITE_OPTIONAL_KEYS = """
    attention.key_length attention.value_length attention.scale embedding_scale logit_scale
    residual_scale rope.freq_base rope.scaling.finetuned
"""

FAMILIES: Mapping[str, TextFamily] = {
    "granitehybrid": TextFamily(
        GraniteMoeHybridConfig,
        GRANITE_HYBRID,
        {
            "plain": {},
            "dense_with_rotation_and_groups": {
                "num_local_experts": 0,
                "position_embedding_type": "rope",
                "mamba_n_groups": 2,
                "mamba_d_conv": 7,
            },
            "attention_alone": {
                "num_hidden_layers": 2,
                "layer_types": ["full_attention"] * 2,
                "position_embedding_type": "rope",
            },
            "attention_last_tied": TIED
            | {
                "num_hidden_layers": 2,
                "layer_types": ["linear_attention", "full_attention"],
                "mamba_conv_bias": False,
                "mamba_proj_bias": True,
            },
        },
        wide=WIDE | {"shared_intermediate_size": 256},
        effective_keys={"rope.scaling.finetuned": True},
        files=(
            CompleteFile(
                optional_keys=f"{GRANITE_OPTIONAL_KEYS} feed_forward_length",
                optional_tensors="blk.0.ssm_conv1d.bias blk.2.ssm_conv1d.bias",
            ),
        ),
    ),
}

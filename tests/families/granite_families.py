"""The rows of Granite in the table of text families."""

from collections.abc import Mapping

from transformers import GraniteConfig, GraniteMoeConfig, GraniteMoeSWAConfig, GraniteSWAConfig

from tests.families.mamba_families import MULTIPLIERS
from tests.families.text_family import SIZES, TIED, CompleteFile, TextFamily, Variant, rope

EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
SWASH = (
    SIZES
    | rope(10000.0)
    | MULTIPLIERS
    | {"num_hidden_layers": 5, "sliding_window": 9, "tie_word_embeddings": False}
)
SWASH_KEYS = {"attention.sliding_window": 10, "attention.rope_pattern": [True] * 4 + [False]}
# Each layer is one of window or all tokens, and of rotated or not.
MIXED = {
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
    "layer_rope_theta": [0, 10000.0, 0, 10000.0, 10000.0],
}

FAMILIES: Mapping[str, TextFamily] = {
    "granite": TextFamily(
        GraniteConfig,
        SIZES | rope(10000.0) | MULTIPLIERS,
        {"plain": {}, "tied": TIED, "no_multipliers": dict.fromkeys(MULTIPLIERS, 1.0)},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length attention.scale embedding_scale
                    logit_scale residual_scale
                """
            ),
        ),
    ),
    "granitemoe": TextFamily(
        GraniteMoeConfig,
        SIZES | rope(10000.0) | MULTIPLIERS | EXPERTS,
        {"plain": {}},
        variants={
            # With experts, MiniCPM is this model, with the usual factor of scores.
            "minicpm_with_experts": Variant({"attention_multiplier": 0.25}, architecture="minicpm")
        },
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length attention.scale embedding_scale
                    logit_scale residual_scale feed_forward_length
                """
            ),
        ),
    ),
    "granite_swa": TextFamily(
        GraniteSWAConfig,
        SWASH,
        {"plain": {}, "tied_with_unrotated_layers": TIED | MIXED},
        effective_keys=SWASH_KEYS | {"attention.sliding_window_pattern": [True] * 4 + [False]},
        refused=(
            ({"attention.rope_pattern": [True] * 4}, "has 4 entries for 5 layers"),
            ({"attention.sliding_window_pattern": 4}, "not an array"),
        ),
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length attention.rope_pattern
                    attention.scale embedding_scale logit_scale residual_scale
                """
            ),
        ),
    ),
    "granite_swa_with_experts": TextFamily(
        GraniteMoeSWAConfig,
        SWASH | EXPERTS,
        {"plain": {"shared_intermediate_size": 32}, "unrotated_layers_without_shared": MIXED},
        effective_keys=SWASH_KEYS,
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length attention.rope_pattern
                    attention.scale embedding_scale logit_scale residual_scale feed_forward_length
                """
            ),
        ),
    ),
}

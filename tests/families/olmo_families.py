"""The rows of the OLMo models in the table of text families."""

from collections.abc import Mapping
from math import log

from transformers import Olmo2Config, Olmo3Config, OlmoConfig, OlmoeConfig

from tests.families.text_family import SIZES, TIED, YARN, CompleteFile, TextFamily, Variant, rope

# Of OLMo 3: layers with a window have no scaling, and here another base, so that both matter.
ROPES = {
    "full_attention": YARN["rope_parameters"] | {"attention_factor": 1.3},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
# YaRN's own magnitude, as in all published settings.
USUAL = 0.1 * log(YARN["rope_parameters"]["factor"]) + 1
USUAL_YARN = YARN["rope_parameters"] | {"attention_factor": USUAL}

FAMILIES: Mapping[str, TextFamily] = {
    "olmo": TextFamily(
        OlmoConfig,
        SIZES | rope(10000.0) | {"clip_qkv": 0.7},
        {"plain": {}, "tied_without_clip": TIED | {"clip_qkv": None, "attention_bias": True}},
        files=(
            CompleteFile(
                optional_keys="attention.key_length attention.value_length attention.clamp_kqv"
            ),
        ),
    ),
    "olmo2": TextFamily(
        Olmo2Config,
        SIZES | rope(500000.0),
        {"plain": {}, "as_many_kv_heads_as_heads": {"num_key_value_heads": 4}, "tied": TIED},
        divided=None,
        files=(CompleteFile(optional_keys="attention.key_length attention.value_length"),),
    ),
    "olmo3": TextFamily(
        Olmo3Config,
        SIZES | {"num_hidden_layers": 4, "sliding_window": 9},
        {
            "plain": {},
            "every_other_layer_full_with_yarn": {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "rope_parameters": ROPES,
                "attention_bias": True,
            },
        },
        divided=None,
        variants={
            "ollama": Variant(flavour="ollama", config="every_other_layer_full_with_yarn"),
            "magnitude_as_first_published": Variant(
                {"rope_parameters": ROPES | {"full_attention": USUAL_YARN}},
                {"rope.scaling.attn_factor": USUAL},
                config="every_other_layer_full_with_yarn",
            ),
            "missing_keys_as_published": Variant(
                keys=dict.fromkeys(("attention.sliding_window_pattern", "rope.freq_base_swa"))
            ),
        },
        effective_keys={"attention.sliding_window": 10, "attention.sliding_window_pattern": 2},
        files=(
            CompleteFile(
                "every_other_layer_full_with_yarn",
                optional_keys="""
                    attention.key_length attention.value_length attention.sliding_window
                    attention.sliding_window_pattern rope.freq_base_swa
                    rope.scaling.original_context_length rope.scaling.attn_factor
                """,
            ),
        ),
    ),
    "olmoe": TextFamily(
        OlmoeConfig,
        SIZES | rope(10000.0) | {"num_experts": 6, "num_experts_per_tok": 2},
        {
            "plain": {},
            "all_experts_per_token_with_biases_and_yarn": YARN
            | {"num_experts_per_tok": 6, "attention_bias": True},
        },
        divided=None,
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length feed_forward_length
                """
            ),
        ),
    ),
}

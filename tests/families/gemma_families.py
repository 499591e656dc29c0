"""The rows of the Gemma models in the table of text families."""

from collections.abc import Mapping
from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
)

from tests.families.text_family import (
    KEY_LENGTHS,
    SIZES,
    TIED,
    WIDE_HEADS,
    CompleteFile,
    TextFamily,
    Variant,
    rope,
)
from tests.tiny_models import tiny_tokenizer

VOCABULARY = tiny_tokenizer().get_vocab_size()
LOCAL, GLOBAL = "sliding_attention", "full_attention"
GEMMA = SIZES | {"sliding_window": 16}
ALTERNATING = GEMMA | {"num_hidden_layers": 4, "layer_types": [LOCAL, GLOBAL] * 2}


def ropes(theta: float, **of_global: Any) -> dict[str, Any]:
    """Bases so small that positions within a short prompt differ clearly."""
    return {
        GLOBAL: {"rope_type": "default", "rope_theta": theta, **of_global},
        LOCAL: {"rope_type": "default", "rope_theta": 100.0},
    }


PUBLISHED_BASES = {"rope_parameters": None}

# Scores and logits of random models are small; caps this low change them.
GEMMA2 = GEMMA | {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}

GEMMA3 = GEMMA | {
    "num_hidden_layers": 7,  # the sixth is global
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "rope_parameters": ropes(5000.0),
}
GEMMA3_SCALED = {"rope_parameters": ropes(5000.0, rope_type="linear", factor=8.0)}
ALTERNATING_PATTERN = {"num_hidden_layers": 4, "sliding_window_pattern": 2}
GEMMA3_SCALED_LAYERS = (34, 48, 62)


def gemma3_scaled(layers: int) -> dict[str, Any]:
    """Sizes of one of the larger models, whose global positions are scaled."""
    scalar = {"query_pre_attn_scalar": 16} if layers == 62 else {}
    return {"num_hidden_layers": layers} | scalar | GEMMA3_SCALED


GEMMA3N = ALTERNATING | {
    "num_kv_shared_layers": 2,
    "head_dim": 8,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "laurel_rank": 16,
    "activation_sparsity_pattern": [0.8, 0.0, 0.6, 0.0],
    "rope_parameters": ropes(500.0),
}

GEMMA4_ROPES = ropes(500.0, rope_type="proportional", partial_rotary_factor=0.25)
GEMMA4_SCALED_ROPES = ropes(500.0, rope_type="proportional", partial_rotary_factor=0.5, factor=8.0)
GEMMA4 = ALTERNATING | {
    "head_dim": 8,
    "global_head_dim": 16,
    "final_logit_softcapping": 30.0,
    "rope_parameters": GEMMA4_ROPES,
}
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
LAYER_INPUTS = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY}
SHARED_KEYS = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}

EIGHT_LAYERS = {
    "num_hidden_layers": 8,
    "layer_types": [LOCAL, GLOBAL] * 4,
    "num_kv_shared_layers": 3,
}
# By family, settings with which three layers use the pages of the two before them.
SHARED_PAGES: Mapping[str, Mapping[str, Any]] = {
    "gemma3n": EIGHT_LAYERS | {"activation_sparsity_pattern": [0.8, 0.0] * 4},
    "gemma4": EIGHT_LAYERS,
}

FAMILIES: Mapping[str, TextFamily] = {
    "gemma": TextFamily(
        GemmaConfig,
        SIZES | TIED | {"head_dim": 32},
        {
            "plain": {},
            "one_kv_head_with_biases": {"num_key_value_heads": 1, "attention_bias": True}
            | rope(500.0),
        },
        wide=WIDE_HEADS,
        files=(CompleteFile(optional_keys="rope.freq_base"),),
    ),
    "gemma2": TextFamily(
        Gemma2Config,
        GEMMA2,
        {
            "plain": {},
            "no_caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            "window_of_one": {"sliding_window": 1},
            "as_many_layers_as_27b": {"num_hidden_layers": 46, "query_pre_attn_scalar": 16},
        },
        wide=WIDE_HEADS | {"query_pre_attn_scalar": 64},
        files=(
            CompleteFile(
                optional_keys="""
                    rope.freq_base attention.sliding_window attn_logit_softcapping
                    final_logit_softcapping
                """
            ),
        ),
    ),
    "gemma3": TextFamily(
        Gemma3TextConfig,
        GEMMA3,
        {
            "plain": {},
            "scaled_global_positions": GEMMA3_SCALED,
            "published_rope_bases": PUBLISHED_BASES,
            "every_other_layer_global": ALTERNATING_PATTERN,
            "window_of_one": {"sliding_window": 1},
            "capped_logits": {"final_logit_softcapping": 3.0},
            "as_many_layers_as_27b": gemma3_scaled(62),
        },
        wide=WIDE_HEADS | {"query_pre_attn_scalar": 64},
        divided="capped_logits",
        variants={
            "ollama": Variant(flavour="ollama"),
            # Ollama's files state a cap that the models do not have.
            "ollama_with_a_cap_of_logits": Variant(
                keys={"final_logit_softcapping": 3.0}, flavour="ollama"
            ),
            "ollama_with_26_layers": Variant({"num_hidden_layers": 26}, flavour="ollama"),
            **{
                f"ollama_without_scaling_with_{layers}_layers": Variant(
                    gemma3_scaled(layers),
                    keys=dict.fromkeys(("rope.scaling.type", "rope.scaling.factor")),
                    flavour="ollama",
                )
                for layers in GEMMA3_SCALED_LAYERS
            },
            "missing_keys_as_published": Variant(
                PUBLISHED_BASES | {"head_dim": 256, "query_pre_attn_scalar": 256},
                keys=KEY_LENGTHS
                | dict.fromkeys(
                    (
                        "attention.layer_norm_rms_epsilon",
                        "rope.freq_base",
                        "rope.freq_base_swa",
                    )
                ),
            ),
            "pattern_as_a_number": Variant(
                ALTERNATING_PATTERN, keys={"attention.sliding_window_pattern": 2}
            ),
            "pattern_as_truth_values": Variant(
                ALTERNATING_PATTERN,
                keys={"attention.sliding_window_pattern": [True, False, True, False]},
            ),
            **{
                f"no_window_stated_as_{stated}": Variant(
                    {"layer_types": [GLOBAL] * 7},
                    keys={
                        "attention.sliding_window": stated,
                        "attention.sliding_window_pattern": None,
                    },
                )
                for stated in (None, 0)
            },
        },
        files=(
            CompleteFile(
                optional_keys="""
                    attention.layer_norm_rms_epsilon rope.freq_base attention.sliding_window
                    rope.freq_base_swa
                """
            ),
            CompleteFile(
                flavour="ollama",
                optional_keys="""
                    attention.layer_norm_rms_epsilon attention.sliding_window
                    rope.global.freq_base rope.local.freq_base
                """,
            ),
        ),
    ),
    "gemma3n": TextFamily(
        Gemma3nTextConfig,
        GEMMA3N,
        {
            "plain": {},
            "no_shared_kv_layers": {"num_kv_shared_layers": 0},
            "another_active_stream": {"altup_active_idx": 2, "altup_num_inputs": 3},
            "published_rope_bases": PUBLISHED_BASES,
            "no_sparsity": {"activation_sparsity_pattern": [0.0] * 4},
            "window_of_one": {"sliding_window": 1},
            "unscaled_correction": {"altup_correct_scale": False},
            "scaled_global_positions": {
                "rope_parameters": ropes(500.0, rope_type="linear", factor=4.0)
            },
            "gates_of_several_widths": {"intermediate_size": [96, 64, 32, 128]},
            "another_cap_of_logits": {"final_logit_softcapping": 3.0},
        },
        wide=WIDE_HEADS | {"hidden_size_per_layer_input": 256, "laurel_rank": 256},
        divided=None,
        variants={
            "ollama": Variant(flavour="ollama"),
            "ollama_without_cap_and_key_lengths": Variant(
                keys={"final_logit_softcapping": None} | KEY_LENGTHS, flavour="ollama"
            ),
        },
        refused=[
            ({"altup.active_idx": 4}, "active_idx` is 4; there are 4 streams"),
            (
                {"activation_sparsity_scale": [0.5, 0.0, 0.0]},
                "sparsity_scale` has 3 entries for 4 layers",
            ),
        ],
        files=(
            CompleteFile(
                optional_keys="""
                    attention.layer_norm_rms_epsilon rope.freq_base rope.freq_base_swa
                    attention.sliding_window_pattern altup.active_idx altup.num_inputs
                    altup.correct_scale final_logit_softcapping
                """
            ),
        ),
    ),
    "gemma4": TextFamily(
        Gemma4TextConfig,
        GEMMA4 | {"hidden_size_per_layer_input": 0},
        {
            "plain": {},
            "keys_as_values": KEYS_AS_VALUES,
            "layer_inputs_and_shared_keys": LAYER_INPUTS | SHARED_KEYS,
            "layer_inputs_shared_keys_and_keys_as_values": (
                LAYER_INPUTS | SHARED_KEYS | KEYS_AS_VALUES
            ),
            "experts": EXPERTS | KEYS_AS_VALUES,
            "all_at_once": LAYER_INPUTS | SHARED_KEYS | EXPERTS | KEYS_AS_VALUES,
            "unified": Gemma4UnifiedTextConfig(**GEMMA4, **KEYS_AS_VALUES),
            "scaled_global_positions": {"rope_parameters": GEMMA4_SCALED_ROPES},
            "full_rotation": {"rope_parameters": ropes(500.0)},
            "published_rope_bases": PUBLISHED_BASES,
            "window_of_one": {"sliding_window": 1} | LAYER_INPUTS | SHARED_KEYS,
            "uncapped_logits": {"final_logit_softcapping": None},
            "biases": {"attention_bias": True} | LAYER_INPUTS | SHARED_KEYS,
        },
        wide=SHARED_KEYS
        | EXPERTS
        | WIDE_HEADS
        | {
            "global_head_dim": 128,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": VOCABULARY,
            "moe_intermediate_size": 256,
        },
        divided="all_at_once",
        variants={
            "ollama_with_layer_inputs_and_shared_keys": Variant(
                flavour="ollama", config="layer_inputs_and_shared_keys"
            ),
            "ollama_with_experts": Variant(flavour="ollama", config="experts"),
            "kv_heads_stated_once_for_each_kind_of_layer": Variant(
                keys={"attention.head_count_kv": 2, "attention.global_head_count_kv": 1},
                config="keys_as_values",
            ),
        },
        refused=[
            ({"attention.shared_kv_layers": 4}, "shared_kv_layers` is 4; it must be below the 4"),
            ({"attention.shared_kv_layers": 3}, "shared_kv_layers` is 3; no layer before"),
            ({"attention.value_length": 8}, "value_length` .*is 8; it must be 16"),
            ({"attention.global_head_count_kv": 3}, "is 3, which does not divide the heads"),
            (
                {
                    "attention.shared_kv_layers": 2,
                    "attention.head_count": [4, 4, 3, 3],
                    "attention.head_count_kv": [2, 2, 3, 3],
                },
                "shares 2 keys among 3 heads",
            ),
            ({"rope.dimension_count_swa": 7}, "dimension_count_swa` is 7; it must be even"),
        ],
        files=(
            CompleteFile(
                "keys_as_values",
                optional_keys="""
                    attention.layer_norm_rms_epsilon rope.freq_base rope.freq_base_swa
                    rope.dimension_count_swa attention.value_length_swa final_logit_softcapping
                    attention.shared_kv_layers embedding_length_per_layer_input
                """,
            ),
            CompleteFile(
                "all_at_once",
                optional_keys="""
                    attention.layer_norm_rms_epsilon rope.freq_base rope.freq_base_swa
                    rope.dimension_count_swa attention.value_length_swa final_logit_softcapping
                    expert_feed_forward_length
                """,
                optional_tensors="blk.1.attn_v.weight",
            ),
        ),
    ),
}

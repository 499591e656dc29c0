"""The rows of models for which `transformers` has no class of their own in the table of text
families."""

from collections.abc import Mapping

import numpy as np
from transformers import (
    DeepseekV3Config,
    HunYuanDenseV1Config,
    LlamaConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    StableLmConfig,
    Starcoder2Config,
)

from tests.families.author_checkpoints import (
    save_baichuan,
    save_codeshell,
    save_deepseek,
    save_exaone,
    save_internlm2,
    save_jais,
    save_maincoder,
    save_openelm,
    save_orion,
    save_pangu,
    save_plm,
    save_qwen,
    save_refact,
    save_xverse,
)
from tests.families.deepseek_families import DEEPSEEK2
from tests.families.falling_twins import BAICHUAN_13B, BaichuanMaker, JaisMaker, RefactMaker
from tests.families.text_family import (
    KEY_LENGTHS,
    LLAMA3_ROPE,
    SIZES,
    TIED,
    WIDE_HEADS,
    Changes,
    CompleteFile,
    TextFamily,
    Variant,
    rope,
)
from tests.families.unnamed_twins import OpenELMMaker, PLMMaker

# The first layer is dense.
DEEPSEEK = (
    SIZES
    | rope(1e4)
    | {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "mlp_only_layers": [0],
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "qkv_bias": False,
    }
)


def with_head_alone(tensors: Mapping[str, np.ndarray]) -> Changes:
    """The tensor of embedding and head with the name of the head."""
    return {"output.weight": tensors["token_embd.weight"], "token_embd.weight": None}


FAMILIES: Mapping[str, TextFamily] = {
    "baichuan": TextFamily(
        LlamaConfig,
        SIZES | rope(10000.0) | {"num_key_value_heads": 4},
        {"plain": {}},
        options={"save": save_baichuan, "maker": BaichuanMaker},
        variants={
            "unstated_base_as_published": Variant(keys={"rope.freq_base": None}),
            "first_generation": Variant({"generation": 1}),
            "falling_scores": Variant(BAICHUAN_13B),
        },
        files=(
            CompleteFile(
                optional_keys="""
                    attention.head_count_kv attention.key_length attention.value_length
                    rope.freq_base attention.layer_norm_rms_epsilon
                """
            ),
        ),
    ),
    "codeshell": TextFamily(
        Starcoder2Config,
        SIZES | rope(10000.0) | {"tie_word_embeddings": False},
        {"plain": {}},
        options={"save": save_codeshell},
        variants={
            "one_tensor_for_embedding_and_head": Variant(TIED, tensors=with_head_alone),
            "scaling_as_published": Variant(
                keys={"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}
            ),
        },
        files=(
            CompleteFile(
                optional_keys="attention.key_length attention.value_length",
                optional_tensors="token_embd.weight",
            ),
        ),
    ),
    "deepseek": TextFamily(
        Qwen2MoeConfig,
        DEEPSEEK,
        {"plain": {}, "tied_and_renormalised": TIED | {"norm_topk_prob": True}},
        options={"save": save_deepseek},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.head_count_kv attention.key_length attention.value_length
                    expert_weights_norm expert_weights_scale
                """
            ),
        ),
    ),
    "exaone": TextFamily(
        LlamaConfig,
        SIZES | rope(1e6) | {"rms_norm_eps": 1e-5},
        {"plain": {}, "tied_with_llama3_rope": TIED | {"rope_parameters": LLAMA3_ROPE}},
        options={"save": save_exaone},
        files=(CompleteFile(optional_keys="attention.key_length attention.value_length"),),
    ),
    "internlm2": TextFamily(
        LlamaConfig,
        SIZES | rope(1e6) | {"rms_norm_eps": 1e-5},
        {"plain": {}, "tied": TIED},
        options={"save": save_internlm2},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length rope.freq_base
                    attention.layer_norm_rms_epsilon
                """
            ),
        ),
    ),
    "jais": TextFamily(
        LlamaConfig,
        SIZES | rope(10000.0) | {"num_key_value_heads": 4},
        {
            "plain": {
                "mup_embeddings_scale": 3.0,
                "mup_output_alpha": 2.0,
                "mup_width_scale": 0.25,
            },
            "older_names_of_scales": {
                "hidden_size": 96,
                "num_attention_heads": 6,
                "num_key_value_heads": 6,
                "embeddings_scale": 3.0,
                "width_scale": 0.5,
            },
        },
        wide=None,
        options={"save": save_jais, "maker": JaisMaker},
        effective_keys={"attention.max_alibi_bias": 5.0},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.max_alibi_bias attention.value_length
                """
            ),
        ),
    ),
    "maincoder": TextFamily(
        HunYuanDenseV1Config,
        SIZES | rope(1e6) | {"head_dim": 16},
        {"plain": {}},
        wide=WIDE_HEADS,
        options={"save": save_maincoder},
        files=(CompleteFile(optional_keys="attention.key_length attention.value_length"),),
    ),
    "openelm": TextFamily(
        Qwen3Config,
        SIZES
        | rope(10000.0)
        | TIED
        | {
            "head_dim": 16,
            "num_query_heads": [4, 6],
            "num_kv_heads": [2, 3],
            "ffn_multipliers": [1.6, 0.6],
            "ffn_dim_divisor": 32,
            "widths": [96, 64],  # that the multipliers lead to
        },
        {"plain": {}},
        wide=None,
        options={"save": save_openelm, "maker": OpenELMMaker},
        files=(CompleteFile(),),
    ),
    "orion": TextFamily(
        StableLmConfig,
        SIZES | rope(10000.0, partial_rotary_factor=1.0),
        {"plain": {}},
        options={"save": save_orion},
        variants={
            "as_published": Variant(
                {"max_position_embeddings": 16384},
                keys={"rope.freq_base": None, "rope.dimension_count": None} | KEY_LENGTHS,
            )
        },
        files=(
            CompleteFile(
                optional_keys="rope.freq_base attention.key_length attention.value_length"
            ),
        ),
    ),
    "pangu-embedded": TextFamily(
        LlamaConfig,
        SIZES | rope(16e6) | {"attention_bias": True},
        {"plain": {}, "tied": TIED},
        options={"save": save_pangu},
        files=(CompleteFile(optional_keys="attention.key_length attention.value_length"),),
    ),
    "plm": TextFamily(
        DeepseekV3Config,
        DEEPSEEK2
        | rope(1e5)
        | TIED
        | {"num_hidden_layers": 2, "first_k_dense_replace": 2, "hidden_act": "relu2"},
        {"plain": {}},
        wide=None,
        options={"save": save_plm, "maker": PLMMaker},
        files=(CompleteFile(optional_keys="attention.head_count_kv"),),
    ),
    "qwen": TextFamily(
        Qwen2Config,
        SIZES | rope(10000.0) | {"num_key_value_heads": 4},
        {"plain": {}},
        options={"save": save_qwen},
        files=(
            CompleteFile(
                optional_keys="attention.head_count_kv attention.key_length attention.value_length"
            ),
        ),
    ),
    "refact": TextFamily(
        LlamaConfig,
        SIZES | rope(10000.0) | {"num_key_value_heads": 1, "intermediate_size": 256},
        {"plain": {}},
        options={"save": save_refact, "maker": RefactMaker},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length attention.layer_norm_rms_epsilon
                """
            ),
        ),
    ),
    "xverse": TextFamily(
        LlamaConfig,
        SIZES | rope(10000.0) | {"num_key_value_heads": 4},
        {"plain": {}},
        options={"save": save_xverse},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.head_count_kv attention.key_length attention.value_length
                    rope.freq_base attention.layer_norm_rms_epsilon
                """
            ),
        ),
    ),
}

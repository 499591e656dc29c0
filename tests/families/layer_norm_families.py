"""The rows of models with layer norms in the table of text families."""

from collections.abc import Mapping

from transformers import (
    BloomConfig,
    DbrxConfig,
    FalconConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    MptConfig,
    NemotronConfig,
    PhiConfig,
    PhimoeConfig,
    StableLmConfig,
    Starcoder2Config,
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

GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 512}
DBRX = {
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 512,
    **rope(5e5),
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 5e5},
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 6, "moe_top_k": 2},
}
FALCON = {key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
PHIMOE_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 512,
    "short_factor": [1.0, 1.02, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0],
    "long_factor": [1.0, 1.3, 2.0, 4.0, 8.0, 12.0, 24.0, 48.0],
    "short_mscale": 1.24,
    "long_mscale": 1.24,
}
LARGER_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}

# Keys that llama.cpp's converters of these families leave out.
UNSTATED = {"unstated_base_as_published": Variant(keys={"rope.freq_base": None} | KEY_LENGTHS)}

FAMILIES: Mapping[str, TextFamily] = {
    "bloom": TextFamily(
        BloomConfig,
        {"hidden_size": 96, "n_layer": 2, "n_head": 6},
        {"plain": {}, "own_head": {"n_head": 4, "tie_word_embeddings": False}},
        wide={"hidden_size": 256, "n_head": 8},
        divided="own_head",
        files=(
            CompleteFile(
                optional_keys="""
                    attention.head_count_kv attention.key_length attention.value_length
                """
            ),
        ),
    ),
    "dbrx": TextFamily(
        DbrxConfig,
        DBRX,
        {"plain": {}},
        wide={"d_model": 256, "ffn_config": DBRX["ffn_config"] | {"ffn_hidden_size": 256}},
        effective_keys={"attention.clamp_kqv": 1.5},
        files=(
            CompleteFile(
                optional_keys="attention.key_length attention.value_length feed_forward_length"
            ),
        ),
    ),
    "falcon": TextFamily(
        FalconConfig,
        FALCON,
        {
            "plain": {},
            "two_norms": LARGER_FALCON | {"tie_word_embeddings": False},
            "more_key_heads": LARGER_FALCON
            | rope(500.0)
            | {"num_ln_in_parallel_attn": 1, "ffn_hidden_size": 96},
        },
        wide={"hidden_size": 256},
        divided="two_norms",
        variants=UNSTATED
        | {
            "falcon_2_as_published": Variant(
                rope(500042.0), keys={"rope.freq_base": None}, config="more_key_heads"
            ),
            "two_norms_with_unstated_base": Variant(
                keys={"rope.freq_base": None}, config="two_norms"
            ),
        },
        files=(
            CompleteFile(
                "two_norms",
                optional_keys="rope.freq_base attention.key_length attention.value_length",
            ),
        ),
    ),
    "gpt2": TextFamily(
        GPT2Config,
        GPT2,
        {"plain": {}, "own_head": {"n_inner": None, "tie_word_embeddings": False}},
        wide={"n_embd": 256, "n_inner": 256},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.head_count_kv attention.key_length attention.value_length
                """
            ),
        ),
    ),
    "gptneox": TextFamily(
        GPTNeoXConfig,
        {key: SIZES[key] for key in SIZES if key != "num_key_value_heads"},
        {
            "plain": {},
            "one_after_the_other": {
                "use_parallel_residual": False,
                **rope(500.0, partial_rotary_factor=0.5),
                **TIED,
            },
        },
        variants=UNSTATED,
        files=(
            CompleteFile(
                "one_after_the_other",
                optional_keys="""
                    attention.head_count_kv attention.key_length attention.value_length
                    rope.freq_base use_parallel_residual
                """,
            ),
        ),
        effective_keys={"use_parallel_residual": False},
    ),
    "mpt": TextFamily(
        MptConfig,
        {"d_model": 96, "n_layers": 2, "n_heads": 6, "max_seq_len": 512},
        {
            "plain": {},
            # `transformers` ignores other slopes.
            "clipped_with_own_head": {
                "n_heads": 4,
                "attn_config": {"clip_qkv": 0.7},
                "tie_word_embeddings": False,
            },
        },
        wide={"d_model": 256, "n_heads": 8},
        divided="clipped_with_own_head",
        effective_keys={"attention.max_alibi_bias": 5.0, "attention.clamp_kqv": 0.3},
        files=(CompleteFile(optional_keys="attention.key_length attention.value_length"),),
    ),
    "nemotron": TextFamily(
        NemotronConfig,
        SIZES | {"pad_token_id": None},
        {
            "plain": {},
            "tied_with_biases": {
                "attention_bias": True,
                "mlp_bias": True,
                "head_dim": 32,
                **rope(500.0, partial_rotary_factor=0.375),
                **TIED,
            },
        },
        wide=WIDE_HEADS,
        variants={
            "rotation_of_wide_heads_as_published": Variant(
                {"head_dim": 32}, keys={"rope.dimension_count": 8}
            ),
        },
        files=(CompleteFile(optional_keys="attention.key_length attention.value_length"),),
    ),
    "phi2": TextFamily(
        PhiConfig,
        SIZES | {"num_key_value_heads": 4},
        {
            "plain": {},
            "other_rotation": rope(500.0, partial_rotary_factor=0.25) | TIED,
        },
        variants=UNSTATED,
        files=(
            CompleteFile(
                optional_keys="""
                    attention.head_count_kv rope.freq_base attention.key_length
                    attention.value_length
                """
            ),
        ),
    ),
    "phimoe": TextFamily(
        PhimoeConfig,
        SIZES
        | rope(1e6)
        | {
            "attention_bias": True,
            "lm_head_bias": True,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
        {
            "plain": {},
            "window_and_short_factors": {
                "sliding_window": 9,
                "max_position_embeddings": 2048,
                "rope_parameters": PHIMOE_ROPE,
            },
        },
        variants={
            "magnitude_as_published": Variant(
                {
                    "max_position_embeddings": 2048,
                    "rope_parameters": PHIMOE_ROPE
                    | dict.fromkeys(("short_mscale", "long_mscale"), 1.243163121016122),
                },
                keys={"rope.scaling.attn_factor": 1.1902380714238083},
            ),
        },
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length feed_forward_length
                """
            ),
        ),
    ),
    "stablelm": TextFamily(
        StableLmConfig,
        SIZES,
        {
            "plain": {"use_qkv_bias": True},
            "parallel_with_head_norms": {
                "use_parallel_residual": True,
                "qk_layernorm": True,
                **rope(500.0, partial_rotary_factor=0.5),
                **TIED,
            },
        },
        divided="parallel_with_head_norms",
        variants=UNSTATED
        | {
            "unstated_base_of_a_long_context": Variant(
                {"max_position_embeddings": 16384} | rope(1e6, partial_rotary_factor=0.5),
                keys={"rope.freq_base": None},
            )
        },
        files=(
            CompleteFile(
                optional_keys="""
                    rope.freq_base attention.key_length attention.value_length
                    use_parallel_residual
                """
            ),
            CompleteFile(
                "parallel_with_head_norms",
                optional_keys="""
                    rope.freq_base attention.key_length attention.value_length
                    use_parallel_residual
                """,
            ),
        ),
    ),
    "starcoder": TextFamily(
        GPTBigCodeConfig,
        GPT2 | {"activation_function": "gelu"},
        {"plain": {}},
        wide={"n_embd": 256, "n_inner": 256},
        files=(CompleteFile(optional_keys="attention.key_length attention.value_length"),),
    ),
    "starcoder2": TextFamily(
        Starcoder2Config,
        SIZES | rope(1e5),
        {"plain": {}, "window_with_own_head": {"sliding_window": 9, "tie_word_embeddings": False}},
        files=(CompleteFile(optional_keys="attention.key_length attention.value_length"),),
    ),
}

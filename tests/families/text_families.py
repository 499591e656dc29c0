"""The table of text families: a row states tiny configurations and the checks that apply to them.

`test_text_models.py` checks every row; other tests take their models from here.
"""

from collections.abc import Mapping

from transformers import (
    CohereConfig,
    Glm4Config,
    GlmConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PixtralVisionConfig,
    SeedOssConfig,
)

from tests.families import (
    deci_families,
    deepseek_families,
    deepseekocr_families,
    ernie_families,
    gemma_families,
    granite_families,
    hunyuan_families,
    image_rows,
    layer_norm_families,
    lfm2_families,
    ling_families,
    mamba_families,
    minicpm_families,
    muse_families,
    olmo_families,
    plamo_families,
    qwen_families,
    routed_families,
    sigmoid_families,
    ternary_families,
    ungated_families,
    unnamed_families,
    unrotated_families,
)
from tests.families.granite_families import EXPERTS
from tests.families.rwkv_families import RWKV7
from tests.families.text_family import (
    KEY_LENGTHS,
    LLAMA3_ROPE,
    LONGROPE,
    SIZES,
    TIED,
    WIDE_HEADS,
    YARN,
    CompleteFile,
    TextFamily,
    Variant,
    rope,
)

# Llama 4: a short prompt crosses several chunks and several steps of the temperature.
LLAMA4 = SIZES | {
    "num_hidden_layers": 5,  # the fourth sees all tokens and has no rotation
    "head_dim": 16,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 16,
    "floor_scale": 8,
    "attn_scale": 0.5,
}
LLAMA4_OPTIONAL_KEYS = """
    attention.chunk_size attention.floor_scale attention.scale attention.temperature_tuning
    interleave_moe_layer_step no_rope_interval use_qk_norm
""".split()

# Mistral 3: a short original context, so that the temperature grows several times in a prompt.
MISTRAL3_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.1,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
# What converters of Ollama write besides the type for models without scaling.
UNSCALED = dict.fromkeys(
    [f"rope.scaling.{name}" for name in ("factor", "beta_fast", "beta_slow")], 0.0
)
MISTRAL3_WITH_VISION = Mistral3Config(
    text_config=MistralConfig(**SIZES, head_dim=32, **rope(1e9)),
    vision_config=PixtralVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
    ),
    image_token_id=10,
)

# gpt-oss.
GPT_OSS_YARN = YARN["rope_parameters"] | {
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}

# Phi 3: all checked sequences are shorter than the original context of 512 tokens.
PARTIAL_LONGROPE = LONGROPE | {
    "partial_rotary_factor": 0.75,
    "short_factor": LONGROPE["short_factor"][:6],
    "long_factor": LONGROPE["long_factor"][:6],
}

TEXT_MODELS: Mapping[str, TextFamily] = {
    "command-r": TextFamily(
        CohereConfig,
        SIZES | rope(8e6) | {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2},
        {
            "plain": {"use_qk_norm": True, "logit_scale": 3.0},
            "biases_without_head_norms": {"attention_bias": True},
        },
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length attention.layer_norm_epsilon
                    logit_scale
                """,
            ),
        ),
    ),
    **deci_families.FAMILIES,
    **deepseek_families.FAMILIES,
    **deepseekocr_families.FAMILIES,
    **ernie_families.FAMILIES,
    **gemma_families.FAMILIES,
    **ling_families.FAMILIES,
    **mamba_families.FAMILIES,
    "chatglm": TextFamily(
        GlmConfig,
        SIZES | {"head_dim": 16, "pad_token_id": None, "eos_token_id": 2},
        {"plain": {}, "tied_without_biases": TIED | {"attention_bias": False}},
        wide=WIDE_HEADS,
        files=(CompleteFile(optional_keys="attention.key_length attention.value_length"),),
    ),
    "glm4": TextFamily(
        Glm4Config,
        SIZES | {"head_dim": 32, "pad_token_id": None, "eos_token_id": 2},
        {
            "plain": {},
            "no_biases": {"attention_bias": False},
            "one_kv_head": {"num_key_value_heads": 1},
        },
        wide=WIDE_HEADS,
    ),
    "gpt-oss": TextFamily(
        GptOssConfig,
        SIZES | EXPERTS | {"num_hidden_layers": 3, "head_dim": 32, "sliding_window": 16},
        {
            "plain": {},
            "one_expert_per_token": {"num_experts_per_tok": 1},
            "all_experts_per_token": {"num_experts_per_tok": 6},
            "short_original_context": {"rope_parameters": GPT_OSS_YARN},
            "window_of_one": {"sliding_window": 1},
        },
        wide=WIDE_HEADS,
        variants={
            "ollama_without_scaling_type_and_expert_width": Variant(
                keys=dict.fromkeys(("rope.scaling.type", "expert_feed_forward_length")),
                flavour="ollama",
            )
        },
        effective_keys={
            "attention.sliding_window": 17,
            "rope.scaling.factor": 31.0,
            "rope.scaling.original_context_length": 2048,
            "rope.freq_base": 1000.0,
            "expert_used_count": 3,
            "attention.layer_norm_rms_epsilon": 0.1,
        },
        files=(
            CompleteFile(
                optional_keys="""
                    attention.layer_norm_rms_epsilon rope.freq_base
                    rope.scaling.original_context_length rope.scaling.yarn_beta_fast
                    rope.scaling.yarn_beta_slow rope.scaling.type attention.sliding_window
                    feed_forward_length expert_feed_forward_length
                """
            ),
            CompleteFile(
                flavour="ollama",
                optional_keys="""
                    attention.layer_norm_rms_epsilon rope.freq_base
                    rope.scaling.original_context_length rope.scaling.yarn_beta_fast
                    rope.scaling.yarn_beta_slow rope.scaling.type attention.sliding_window
                    feed_forward_length expert_feed_forward_length
                """,
            ),
        ),
    ),
    **granite_families.FAMILIES,
    **layer_norm_families.FAMILIES,
    **lfm2_families.FAMILIES,
    **hunyuan_families.FAMILIES,
    "llama": TextFamily(
        LlamaConfig,
        SIZES | rope(10000.0) | {"rms_norm_eps": 1e-5},
        {
            "plain": {},
            "as_many_kv_heads_as_heads": {"num_key_value_heads": 4},
            "tied": TIED,
            "biases": {"attention_bias": True, "mlp_bias": True},
            "heads_wider_than_hidden": {"head_dim": 32},
            "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
            "yarn": YARN,
            "yarn_with_all_parameters": {
                "rope_parameters": YARN["rope_parameters"]
                | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 0.7}
            },
            "linear_rope_scaling": {
                "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
            },
        },
        variants={
            "older_spellings": Variant(
                config="linear_rope_scaling",
                keys={
                    "attention.head_count": [4, 4],
                    "attention.head_count_kv": [2, 2],
                    "feed_forward_length": [96, 96],
                    "rope.scaling.type": None,
                    "rope.scaling.factor": None,
                    "rope.scale_linear": 2.0,
                    "rope.freq_base": None,
                    "rope.dimension_count": None,
                    "vocab_size": None,
                }
                | KEY_LENGTHS,
            )
        },
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length rope.freq_base
                    attention.layer_norm_rms_epsilon
                """
            ),
        ),
    ),
    "llama4": TextFamily(
        Llama4TextConfig,
        LLAMA4,
        {
            "plain": {},
            "experts_in_every_other_layer": {"interleave_moe_layer_step": 2},
            "two_experts_per_token": {"num_experts_per_tok": 2},
            "no_qk_norms": {"use_qk_norm": False},
            "no_temperature": {"attn_temperature_tuning": False},
            "every_other_layer_global": {"no_rope_layer_interval": 2},
            "rope_factors": {"rope_parameters": LLAMA3_ROPE},
            "chunks_of_one": {"attention_chunk_size": 1},
            "other_rope_base": rope(100.0),
            "heads_wider_than_hidden": {"head_dim": 32},
        },
        wide=WIDE_HEADS | {"intermediate_size_mlp": 512, "interleave_moe_layer_step": 2},
        divided="experts_in_every_other_layer",
        variants={
            "ollama_with_head_size_in_its_own_key": Variant(
                {"head_dim": 32},
                keys={"rope.dimension_count": None} | KEY_LENGTHS,
                flavour="ollama",
            ),
            # Prompts are shorter than the published chunks and than the temperature's first step.
            "missing_keys_as_published": Variant(
                {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
                keys=dict.fromkeys(LLAMA4_OPTIONAL_KEYS),
            ),
            "no_qk_norms_with_128_experts": Variant(
                {"num_local_experts": 128, "use_qk_norm": False}, keys={"use_qk_norm": None}
            ),
        },
        effective_keys={
            "attention.chunk_size": 17,
            "attention.floor_scale": 9,
            "attention.scale": 0.4,
            "attention.temperature_tuning": False,
            "no_rope_interval": 3,
            "use_qk_norm": False,
            "rope.freq_base": 1000.0,
        },
        files=(
            CompleteFile(
                "experts_in_every_other_layer",
                optional_keys="""
                    attention.key_length attention.value_length rope.freq_base no_rope_interval
                    use_qk_norm attention.head_dim attention.chunk_size
                    attention.temperature_tuning attention.scale attention.floor_scale
                """,
            ),
        ),
    ),
    **minicpm_families.FAMILIES,
    **muse_families.FAMILIES,
    "mistral": TextFamily(
        MistralConfig,
        SIZES | {"sliding_window": None},
        {"plain": {}, "nemo": {"head_dim": 32}},
        wide=None,
        files=(
            CompleteFile("nemo", optional_keys="rope.freq_base attention.layer_norm_rms_epsilon"),
        ),
    ),
    "mistral3": TextFamily(
        Ministral3Config,
        SIZES | {"head_dim": 32, "rope_parameters": MISTRAL3_YARN},
        {
            "plain": {"rope_parameters": MISTRAL3_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
            "different_magnitudes": {
                "rope_parameters": MISTRAL3_YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}
            },
            "stated_magnitude": {"rope_parameters": MISTRAL3_YARN | {"attention_factor": 1.2}},
            "text_of_a_vision_model": MISTRAL3_WITH_VISION,
        },
        wide=WIDE_HEADS,
        variants={
            "ollama": Variant(flavour="ollama"),
            "ollama_with_different_magnitudes": Variant(
                flavour="ollama", config="different_magnitudes"
            ),
            **{
                f"scaling_of_type_{stated or 'nothing'}": Variant(
                    keys=UNSCALED | {"rope.scaling.type": stated},
                    config="text_of_a_vision_model",
                )
                for stated in ("", "default")
            },
        },
        files=(
            CompleteFile(
                optional_keys="""
                    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
                    rope.scaling.original_context_length rope.scaling.mscale
                    rope.scaling.yarn_log_multiplier attention.temperature_scale
                """
            ),
        ),
    ),
    "mixtral": TextFamily(
        MixtralConfig,
        SIZES | EXPERTS | {"head_dim": 16},
        {
            "plain": {},
            "one_expert_per_token": {"num_experts_per_tok": 1},
            "all_experts_per_token": {"num_experts_per_tok": 6},
            "tied": TIED,
        },
        wide=WIDE_HEADS,
        files=(
            CompleteFile(
                optional_keys="""
                    rope.freq_base attention.layer_norm_rms_epsilon attention.key_length
                    attention.value_length feed_forward_length
                """
            ),
        ),
    ),
    # Without images here; `test_mllama.py` has images.
    "mllama": TextFamily(
        image_rows.tiny_config,
        image_rows.SIZES,
        {
            "plain": {},
            "cross_attention_in_the_last_layer": {"cross_attention_layers": [0, 4]},
            "as_many_kv_heads_as_heads": {"num_key_value_heads": 4},
        },
        options=image_rows.OPTIONS,
        keys=image_rows.VISION_KEYS,
        files=(
            CompleteFile(
                optional_keys="""
                    attention.layer_norm_rms_epsilon rope.freq_base attention.key_length
                    attention.value_length vision.image_size vision.max_num_tiles
                """
            ),
        ),
    ),
    **olmo_families.FAMILIES,
    "phi3": TextFamily(
        Phi3Config,
        SIZES | {"original_max_position_embeddings": 512},
        {
            "plain": {},
            "window": {"sliding_window": 9},
            "tied": TIED,
            "short_factors": {"max_position_embeddings": 2048, "rope_parameters": LONGROPE},
            "partial_rotation": {
                "max_position_embeddings": 2048,
                "rope_parameters": PARTIAL_LONGROPE,
            },
            "beyond_the_original_context": {
                "original_max_position_embeddings": 16,
                "rope_parameters": LONGROPE,
            },
        },
        divided="window",
        variants={
            # The converter of llama.cpp always states the original context, but writes factors
            # only if the settings have them.
            "longer_context_without_factors": Variant(
                keys={"rope.scaling.original_context_length": 256}
            )
        },
        files=(
            CompleteFile(
                optional_keys="rope.freq_base attention.key_length attention.value_length"
            ),
            CompleteFile(
                "beyond_the_original_context",
                optional_keys="""
                    rope.freq_base attention.key_length attention.value_length
                    rope.scaling.attn_factor
                """,
            ),
        ),
    ),
    **plamo_families.FAMILIES,
    **qwen_families.FAMILIES,
    "rwkv7": RWKV7,
    "seed_oss": TextFamily(
        SeedOssConfig,
        SIZES | rope(1e7) | {"head_dim": 32, "pad_token_id": None},
        {
            "plain": {},
            "all_biases": {"attention_out_bias": True, "mlp_bias": True},
            "tied_without_biases": TIED | YARN | {"attention_bias": False},
        },
        wide=WIDE_HEADS,
    ),
    **routed_families.FAMILIES,
    **ternary_families.FAMILIES,
    **sigmoid_families.FAMILIES,
    **ungated_families.FAMILIES,
    **unnamed_families.FAMILIES,
    **unrotated_families.FAMILIES,
}

# Families of which each has a layer, a norm, a cache or a scale that none of the others has: for
# tests of what all families share, such as the engine, which would learn nothing from the rest.
DIVERSE = tuple(
    """
    llama apertus bloom command-r deepseek2 falcon-h1 gemma2 gemma3 gemma3n gemma4 glm-dsa gpt-oss
    gpt2 granitehybrid kimi-linear lfm2 llama4 mamba minimax-m2 minimax-m3 mllama nemotron_h_moe
    olmo olmo2 phi2 phi3 qwen35moe qwen4exp rwkv7
    """.split()
)

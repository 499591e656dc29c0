"""The row of DeepSeek's architecture in the table of text families."""

from collections.abc import Mapping

import numpy as np
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    KimiLinearConfig,
    Mistral3Config,
    Mistral4Config,
    PixtralVisionConfig,
    YoutuConfig,
)
from transformers.models.kimi_linear import modeling_kimi_linear

from tests.families.text_family import (
    TIED,
    YARN,
    Changes,
    CompleteFile,
    TextFamily,
    Variant,
    rope,
)

# DeepSeek V2 and V3; the flavours differ in the matrices of keys and values.
DEEPSEEK2 = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 512,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
DEEPSEEK2_GROUPS = {"q_lora_rank": 48, "n_group": 4, "topk_group": 2}
DEEPSEEK2_YARN = {
    "rope_parameters": YARN["rope_parameters"]
    | {"factor": 8.0, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}
}
DEEPSEEK2_USUAL_YARN = {"rope_parameters": YARN["rope_parameters"] | {"factor": 8.0}}
GLM_FLASH = {key: value for key, value in DEEPSEEK2.items() if key != "first_k_dense_replace"}
GLM_FLASH |= rope(1e6) | {"q_lora_rank": 48}
# Rows attend to fewer tokens than prompts have. With so many heads of indexers no scores are equal.
GLM5 = GLM_FLASH | {"first_k_dense_replace": 1, "n_shared_experts": 1}
GLM5 |= {"index_topk": 7, "index_n_heads": 8, "index_head_dim": 24}
DEEPSEEK_V32 = (
    GLM5
    | DEEPSEEK2_GROUPS
    | {
        "rope_parameters": DEEPSEEK2_YARN["rope_parameters"]
        | {"mscale": 1.0, "mscale_all_dim": 1.0}
    }
)
# Keys of Ollama's first files: those of heads and of cached rows are the other way round.
FIRST_GLM_FLASH = {
    "attention.head_count_kv": 4,
    "attention.key_length": 16 + 8,
    "attention.value_length": 24,
    "attention.key_length_mla": 32 + 8,
    "attention.value_length_mla": 32,
    "expert_group_count": None,
    "expert_group_used_count": None,
}
YOUTU_LACKS = ("moe", "experts", "expert", "first")
YOUTU = {
    key: value
    for key, value in DEEPSEEK2.items()
    if not any(word in key.split("_") for word in YOUTU_LACKS)
} | {"q_lora_rank": 48}
# A short original context, so that the temperature grows several times in a prompt.
MISTRAL4_ROPE = {
    "rope_parameters": YARN["rope_parameters"]
    | {
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
}
MISTRAL4 = DEEPSEEK2 | {"q_lora_rank": 48, "n_shared_experts": 1} | MISTRAL4_ROPE
MISTRAL4_WITH_VISION = Mistral3Config(
    text_config=Mistral4Config(**MISTRAL4, n_group=1),
    vision_config=PixtralVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
    ),
    image_token_id=10,
)
KIMI_LACKS = ("first_k_dense_replace", "n_routed_experts")
DEEPSEEK2_OPTIONAL_KEYS = """
    attention.head_count_kv expert_gating_func expert_weights_scale
    rope.scaling.original_context_length rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow rope.scaling.yarn_log_multiplier
"""

DEEPSEEK_V32_OPTIONAL_KEYS = f"""{DEEPSEEK2_OPTIONAL_KEYS}
    attention.key_length attention.value_length expert_weights_norm
"""
GLM5_OPTIONAL_KEYS = """
    attention.head_count_kv attention.indexer.types attention.key_length attention.value_length
    expert_gating_func expert_weights_norm expert_weights_scale
"""


def without_indexers(tensors: Mapping[str, np.ndarray]) -> Changes:
    return dict.fromkeys(name for name in tensors if ".indexer." in name)


FAMILIES: Mapping[str, TextFamily] = {
    "deepseek2": TextFamily(
        DeepseekV2Config,
        DEEPSEEK2 | rope(10000.0),
        {
            "plain": {},
            "yarn": DEEPSEEK2_YARN,
            "large": DEEPSEEK2_GROUPS
            | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
            "v3": DeepseekV3Config(
                **(DEEPSEEK2 | DEEPSEEK2_GROUPS | DEEPSEEK2_YARN), num_mtp_layers=0
            ),
            "v3_not_renormalised": DeepseekV3Config(
                **(DEEPSEEK2 | DEEPSEEK2_GROUPS | rope(10000.0)),
                num_mtp_layers=0,
                norm_topk_prob=False,
            ),
            "glm_flash": Glm4MoeLiteConfig(**GLM_FLASH),
            "glm_flash_with_two_dense_layers": Glm4MoeLiteConfig(
                **(GLM_FLASH | TIED),
                mlp_layer_types=["dense", "dense", "sparse"],
                n_group=2,
                attention_bias=True,
            ),
            "youtu": YoutuConfig(**(YOUTU | rope(1.6e6) | TIED)),
        },
        wide={
            "hidden_size": 256,
            "intermediate_size": 256,
            "moe_intermediate_size": 256,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
        },
        divided="v3",
        files=(
            CompleteFile(
                "v3",
                optional_keys=DEEPSEEK2_OPTIONAL_KEYS
                + "attention.key_length attention.value_length expert_weights_norm",
            ),
            CompleteFile("yarn", "ollama", DEEPSEEK2_OPTIONAL_KEYS),
        ),
        variants={
            name + "_with_attn_kv_b": Variant(flavour="ollama", config=name)
            for name in ("plain", "yarn", "large", "v3")
        }
        | {
            # Converters of Ollama state a multiplier of 0 if the settings have none.
            f"yarn_with_a_multiplier_of_{stated}": Variant(
                DEEPSEEK2_USUAL_YARN, keys={"rope.scaling.yarn_log_multiplier": stated}
            )
            for stated in (None, 0.0)
        }
        | {
            f"{name}_with_the_gating_function_{stated}": Variant(
                keys={"expert_gating_func": stated}, config=name
            )
            for name, stated in (("plain", 0), ("glm_flash", 0), ("glm_flash", None))
        }
        | {
            "glm_flash_of_the_first_ollama_files": Variant(
                architecture="glm4moelite", keys=FIRST_GLM_FLASH, config="glm_flash"
            ),
        },
    ),
    "glm-dsa": TextFamily(
        GlmMoeDsaConfig,
        GLM5,
        {
            "plain": {},
            "all_tokens": {"index_topk": 512},
            "indexers_of_two_layers": {
                "indexer_types": ["full", "full", "shared"],
                "n_group": 4,
                "topk_group": 2,
            },
            "deepseek_v32": DeepseekV32Config(**DEEPSEEK_V32),
        },
        wide={
            "hidden_size": 256,
            "intermediate_size": 256,
            "moe_intermediate_size": 256,
            "q_lora_rank": 256,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
        },
        divided="indexers_of_two_layers",
        files=(
            CompleteFile("indexers_of_two_layers", optional_keys=GLM5_OPTIONAL_KEYS),
            CompleteFile("deepseek_v32", optional_keys=DEEPSEEK_V32_OPTIONAL_KEYS),
        ),
        variants={
            "without_stated_indexers": Variant(
                keys={"attention.indexer.types": None}, config="indexers_of_two_layers"
            ),
            "without_indexers": Variant(
                architecture="deepseek32", tensors=without_indexers, config="all_tokens"
            ),
        },
        effective_keys={"attention.indexer.top_k": 5},
        refused=(
            ({"attention.indexer.types": [False, True, True]}, "first layer without an indexer"),
            ({"attention.indexer.types": [True, True]}, "or later ones"),
            ({"attention.indexer.key_length": 4}, "8 elements are rotated"),
        ),
    ),
    "kimi-linear": TextFamily(
        KimiLinearConfig,
        {key: value for key, value in DEEPSEEK2.items() if key not in KIMI_LACKS}
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_local_experts": 8,
            "linear_head_dim": 32,
            "linear_num_heads": 4,
        },
        {
            "plain": {},
            "compressed_queries_and_groups": {
                "q_lora_rank": 48,
                "n_group": 4,
                "topk_group": 2,
                "norm_topk_prob": False,
                "linear_conv_kernel_dim": 3,
            },
        },
        wide={
            "hidden_size": 256,
            "intermediate_size": 256,
            "moe_intermediate_size": 256,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "linear_head_dim": 64,
        },
        delta_rule=(modeling_kimi_linear,),
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length expert_gating_func
                    expert_group_count expert_group_used_count expert_weights_norm
                    expert_weights_scale
                """
            ),
        ),
    ),
    "mistral4": TextFamily(
        Mistral4Config,
        MISTRAL4,
        {
            "plain": {},
            "all_experts": {
                "first_k_dense_replace": 0,
                "norm_topk_prob": False,
                "routed_scaling_factor": 2.0,
            },
            "with_vision": MISTRAL4_WITH_VISION,
        },
        wide={
            "hidden_size": 256,
            "intermediate_size": 256,
            "moe_intermediate_size": 256,
            "q_lora_rank": 256,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
        },
        effective_keys={
            "attention.temperature_scale": 0.5,
            "attention.temperature_length": 8,
            "expert_weights_norm": False,
        },
        files=(
            CompleteFile(
                optional_keys="""
                    attention.head_count_kv attention.key_length attention.value_length
                    attention.temperature_length attention.temperature_scale expert_gating_func
                    expert_weights_norm expert_weights_scale rope.scaling.original_context_length
                    rope.scaling.yarn_log_multiplier
                """
            ),
        ),
    ),
}

"""The rows of MiniCPM in the table of text families."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM, MiniCPM3Config

from tests.families.text_family import (
    LONGROPE,
    SIZES,
    TIED,
    CompleteFile,
    TextFamily,
    Variant,
    rope,
)


class MiniCPMConfig(GraniteConfig):
    """MiniCPM 1, 2 and 4, which `transformers` does not have, as Granite computes it."""

    model_type = "minicpm"
    scale_emb: float = 12.0
    scale_depth: float = 1.4
    dim_model_base: int = 256

    def __post_init__(self, **kwargs: Any) -> None:
        self.embedding_multiplier = self.scale_emb
        self.residual_multiplier = self.scale_depth / self.num_hidden_layers**0.5
        self.logits_scaling = self.hidden_size / self.dim_model_base
        self.attention_multiplier = (self.hidden_size / self.num_attention_heads) ** -0.5
        super().__post_init__(**kwargs)


class MiniCPMForCausalLM(GraniteForCausalLM):
    """Named as the authors' class."""

    config_class = MiniCPMConfig


AutoModelForCausalLM.register(MiniCPMConfig, MiniCPMForCausalLM)

MULTIPLIERS = {"scale_emb": 7.0, "scale_depth": 0.9, "dim_model_base": 48}
MULTIPLIER_KEYS = dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"))
EXTENDED = {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 16}}
NOT_EXTENDED = {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 512}}
# As llama.cpp's converters write factors.
FACTORS_ALONE = {"rope.scaling.original_context_length": None, "rope.scaling.attn_factor": None}
MINICPM3 = SIZES | {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "pad_token_id": None,
}

FAMILIES: Mapping[str, TextFamily] = {
    "minicpm": TextFamily(
        MiniCPMConfig,
        SIZES | rope(10000.0) | MULTIPLIERS,
        {"plain": {}, "tied_beyond_the_original_context": TIED | EXTENDED},
        variants={
            "first_files_without_multipliers": Variant(
                {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
                keys=MULTIPLIER_KEYS,
            ),
            "factors_without_original_context": Variant(NOT_EXTENDED, keys=FACTORS_ALONE),
        },
        effective_keys={"embedding_scale": 3.0, "residual_scale": 0.3, "logit_scale": 3.0},
        files=(
            CompleteFile(
                optional_keys="""
                    attention.key_length attention.value_length rope.freq_base embedding_scale
                    residual_scale logit_scale
                """
            ),
        ),
    ),
    "minicpm3": TextFamily(
        MiniCPM3Config,
        MINICPM3 | rope(10000.0),
        {
            "plain": {},
            "own_head_beyond_the_original_context": EXTENDED
            | {"tie_word_embeddings": False, "v_head_dim": 24},
            "queries_of_full_rank": {"q_lora_rank": None},
        },
        wide={
            "hidden_size": 256,
            "intermediate_size": 256,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 48,
            "v_head_dim": 64,
        },
        variants={
            "as_published": Variant(
                NOT_EXTENDED,
                keys=FACTORS_ALONE | {"rope.freq_base": None, "attention.value_length": None},
            ),
        },
        files=(
            CompleteFile(
                optional_keys="attention.head_count_kv attention.value_length rope.freq_base"
            ),
        ),
    ),
}

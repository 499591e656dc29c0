"""MiniCPM 1 to 4.1: conversion of checkpoints to GGUF."""

from model_zoo.convert import checks, decoders, latent_rules, longrope
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule

# Settings of MiniCPM 3 that its files do not state; readers assume those of the only model.
_EMBEDDING_SCALE, _DEPTH_SCALE, _LOGIT_WIDTH = 12, 1.4, 256


def _residual_scale(config: Configuration) -> float:
    return float(config.require("scale_depth") / config.layers**0.5)


def _logit_scale(config: Configuration) -> float:
    return float(config.require_size("hidden_size") / config.require_size("dim_model_base"))


def _value_size(config: Configuration) -> int:
    """The authors' settings do not state it."""
    stated = config.get("v_head_dim")
    if stated is not None:
        return config.require_size("v_head_dim")
    return config.require_size("hidden_size") // config.require_size("num_attention_heads")


CONVERSION = Conversion(
    serves=("MiniCPMForCausalLM",),
    model_types=("minicpm",),
    architecture="minicpm",
    keys=(
        *decoders.KEYS,
        Key("embedding_scale", "scale_emb", of=float),
        Key("residual_scale", _residual_scale),
        Key("logit_scale", _logit_scale),
        longrope.TYPE,
        *longrope.keys(),
    ),
    rules=decoders.llama_rules(rotated=True),
    computed=longrope.factors(),
    # As in MiniCPMConfig of the authors.
    defaults={"scale_emb": 1, "scale_depth": 1, "dim_model_base": 1, "tie_word_embeddings": True},
    check=checks.only_scalings(*longrope.KINDS),
)

LATENT = Conversion(
    serves=("MiniCPM3ForCausalLM",),
    model_types=("minicpm3",),
    architecture="minicpm3",
    keys=(
        *decoders.SIZES,
        Key("attention.q_lora_rank", "q_lora_rank", optional=True),
        Key("attention.kv_lora_rank", "kv_lora_rank"),
        Key("attention.key_length", latent_rules.query_size),
        Key("attention.value_length", _value_size),
        Key("rope.dimension_count", "qk_rope_head_dim"),
        decoders.ROPE_BASE,
        *longrope.keys(),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.PRE_NORMS,
        *latent_rules.projections(),
        Rule(f"{latent_rules.ATTENTION}.kv_b_proj.weight", "blk.{n}.attn_kv_b.weight"),
        *decoders.feed_forward(),
    ),
    computed=longrope.factors(),
    defaults={"tie_word_embeddings": True},
    spellings={"head_dim": "qk_rope_head_dim"},
    check=checks.all_of(
        checks.only_scalings(*longrope.KINDS),
        checks.only_values(
            scale_emb=_EMBEDDING_SCALE, scale_depth=_DEPTH_SCALE, dim_model_base=_LOGIT_WIDTH
        ),
    ),
)

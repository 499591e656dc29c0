"""Jais 1: conversion of text model checkpoints to GGUF."""

from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.encoders import GPT2_SPELLINGS
from model_zoo.convert.mapping import OUTPUT, Conversion, Key, Rule
from model_zoo.convert.transforms import transposed

_REPLACED = ("attention.head_count_kv", "rope.dimension_count", "rope.freq_base")
_PROJECTIONS = (
    ("attn.c_attn", "attn_qkv"),
    ("attn.c_proj", "attn_output"),
    ("mlp.c_fc2", "ffn_gate"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
)


def _scaled_embedding(config: Configuration, rows: Tensor) -> Tensor:
    """By the scale of embeddings, which has two names."""
    scale = config.get("mup_embeddings_scale", config.get("embeddings_scale"))
    return rows.float() * _number(config, "embeddings_scale", scale)


def _scaled_head(config: Configuration, rows: Tensor) -> Tensor:
    """By the scale of logits, which is stated as it is or as two factors."""
    alpha = config.get("mup_output_alpha")
    if alpha is None:
        scale = config.get("width_scale")
    else:
        scale = float(alpha) * float(config.require("mup_width_scale"))
    return rows.float() * _number(config, "width_scale", scale)


def _number(config: Configuration, name: str, value: object) -> float:
    if not isinstance(value, int | float):
        raise config.error(f"has no number as `{name}`, which this architecture needs")
    return float(value)


CONVERSION = Conversion(
    serves=("JAISLMHeadModel",),
    architecture="jais",
    keys=(
        *(key for key in decoders.layer_normed() if key.name not in _REPLACED),
        Key("attention.max_alibi_bias", lambda c: 8.0),  # of all models
    ),
    rules=(
        Rule("wte.weight", "token_embd.weight", _scaled_embedding),
        Rule("ln_f.*", "output_norm.*"),
        Rule("lm_head.weight", OUTPUT, _scaled_head),
        *(
            rule
            for name, target in _PROJECTIONS
            for rule in (
                Rule(f"h.{{n}}.{name}.weight", f"blk.{{n}}.{target}.weight", transposed),
                Rule(f"h.{{n}}.{name}.bias", f"blk.{{n}}.{target}.bias"),
            )
        ),
        Rule("h.{n}.ln_1.*", "blk.{n}.attn_norm.*"),
        Rule("h.{n}.ln_2.*", "blk.{n}.ffn_norm.*"),
    ),
    roots=("transformer.",),
    drop=("relative_pe.slopes", "h.{n}.attn.bias", "h.{n}.attn.masked_bias"),
    spellings=GPT2_SPELLINGS,
    check=checks.only_values(
        activation_function="swiglu",
        position_embedding_type="alibi",
        alibi_scaling=None,
        mup_scale_qk_dot_by_d=True,
        scale_qk_dot_by_d=True,
        tie_word_embeddings=False,
    ),
)

"""GLM-4 0414, GLM-4.1V and GLM-OCR: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

import torch
from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Rule, Transform

# As in Glm4vTextRotaryEmbedding of `transformers`.
SECTIONS = (8, 12, 12)
_QUERIES, _KEYS, *_OTHERS = decoders.attention()
_RULES = (
    *decoders.EMBEDDINGS,
    *_OTHERS,
    Rule("layers.{n}.mlp.gate_up_proj.weight", "blk.{n}.ffn_up.weight"),
    Rule("layers.{n}.mlp.down_proj.weight", "blk.{n}.ffn_down.weight"),
    Rule("layers.{n}.input_layernorm.weight", "blk.{n}.attn_norm.weight"),
    Rule("layers.{n}.post_self_attn_layernorm.weight", "blk.{n}.post_attention_norm.weight"),
    Rule("layers.{n}.post_attention_layernorm.weight", "blk.{n}.ffn_norm.weight"),
    Rule("layers.{n}.post_mlp_layernorm.weight", "blk.{n}.post_ffw_norm.weight"),
)


def in_halves(heads_key: str) -> Transform:
    """Puts the even ones of the rotated rows of each head before the odd ones, because readers
    rotate row j with row j + d/2 where positions have several axes.

    heads_key: the setting with the number of heads. weight [heads * d, in] or bias [heads * d].
    """

    def transform(config: Configuration, rows: Tensor) -> Tensor:
        heads, rotated = config.require_size(heads_key), decoders.rotated_size(config)
        if rows.shape[0] != heads * config.head_dim:
            raise config.error(f"has {heads} as `{heads_key}`, but there are {rows.shape[0]} rows")
        each = rows.unflatten(0, (heads, config.head_dim))
        turned, others = each[:, :rotated], each[:, rotated:]
        return torch.cat([turned[:, 0::2], turned[:, 1::2], others], dim=1).flatten(0, 1)

    return transform


CONVERSION = Conversion(
    serves=("Glm4ForCausalLM",),
    model_types=("glm4",),
    architecture="glm4",
    keys=decoders.KEYS,
    rules=(_QUERIES, _KEYS, *_RULES),
    drop=decoders.BUFFERS,
    defaults={"partial_rotary_factor": 0.5, "head_dim": 128},
    check=checks.only_scalings(),
)


OF_VISION_MODELS = Conversion(
    serves=("Glm4vForConditionalGeneration", "GlmOcrForConditionalGeneration"),
    model_types=("glm4v_text",),
    architecture={LLAMA_CPP: "glm4"},
    keys=(*decoders.KEYS, decoders.sections_key(SECTIONS)),
    rules=(
        replace(_QUERIES, transform=in_halves("num_attention_heads")),
        replace(_KEYS, transform=in_halves("num_key_value_heads")),
        *_RULES,
    ),
    drop=(*decoders.BUFFERS, *decoders.OTHER_PARTS),
    check=checks.only_scalings("mrope"),
)

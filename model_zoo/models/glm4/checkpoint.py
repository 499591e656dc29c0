"""GLM up to 4.1V, GLM-Edge and GLM-OCR: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

import torch
from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import FLAVOURS, LLAMA_CPP, OLLAMA, Conversion, Key, Rule, Transform
from model_zoo.convert.transforms import first_half, second_half

# As in Glm4vTextRotaryEmbedding of `transformers`.
SECTIONS = (8, 12, 12)
_QUERIES, _KEYS, _VALUES, _OUTPUT = decoders.attention()
_RULES = (
    *decoders.EMBEDDINGS,
    _VALUES,
    Rule("layers.{n}.mlp.down_proj.weight", "blk.{n}.ffn_down.weight"),
    Rule("layers.{n}.input_layernorm.weight", "blk.{n}.attn_norm.weight"),
    Rule("layers.{n}.post_attention_layernorm.weight", "blk.{n}.ffn_norm.weight"),
)
# Tensors with other names in Ollama's files, which divide the matrix of gate and up.
_LLAMA_CPPS = (
    _OUTPUT,
    Rule("layers.{n}.mlp.gate_up_proj.weight", "blk.{n}.ffn_up.weight"),
    Rule("layers.{n}.post_self_attn_layernorm.weight", "blk.{n}.post_attention_norm.weight"),
    Rule("layers.{n}.post_mlp_layernorm.weight", "blk.{n}.post_ffw_norm.weight"),
)
_OLLAMAS = (
    Rule("layers.{n}.self_attn.o_proj.*", "blk.{n}.attn_out.*"),
    Rule("layers.{n}.mlp.gate_up_proj.weight", "blk.{n}.ffn_gate.weight", first_half),
    Rule("layers.{n}.mlp.gate_up_proj.weight", "blk.{n}.ffn_up.weight", second_half),
    Rule("layers.{n}.post_self_attn_layernorm.weight", "blk.{n}.post_attn_norm.weight"),
    Rule("layers.{n}.post_mlp_layernorm.weight", "blk.{n}.post_ffn_norm.weight"),
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
    rules=(_QUERIES, _KEYS, *_RULES, *_LLAMA_CPPS),
    defaults={"partial_rotary_factor": 0.5, "head_dim": 128},
    check=checks.only_scalings(),
)


_PERMUTED = (
    replace(_QUERIES, transform=in_halves("num_attention_heads")),
    replace(_KEYS, transform=in_halves("num_key_value_heads")),
)
OF_VISION_MODELS = Conversion(
    serves=("Glm4vForConditionalGeneration",),
    model_types=("glm4v_text",),
    architecture={LLAMA_CPP: "glm4"},
    keys=(*decoders.KEYS, decoders.sections_key(SECTIONS)),
    rules=(*_PERMUTED, *_RULES, *_LLAMA_CPPS),
    drop=decoders.OTHER_PARTS,
    check=checks.only_scalings("mrope"),
)


OCR = replace(
    OF_VISION_MODELS,
    serves=("GlmOcrForConditionalGeneration",),
    model_types=("glm_ocr_text",),
    architecture={LLAMA_CPP: "glm4", OLLAMA: "glmocr"},
    keys=(
        *OF_VISION_MODELS.keys,
        Key(
            "rope.mrope_section",
            lambda c: decoders.rotated_sections(c, SECTIONS),
            flavours=(OLLAMA,),
        ),
        *(
            Key(name, name, optional=True, flavours=(OLLAMA,))
            for name in ("image_token_id", "image_start_token_id", "image_end_token_id")
        ),
    ),
    rules=(
        *_PERMUTED,
        *_RULES,
        *(replace(rule, flavours=(LLAMA_CPP,)) for rule in _LLAMA_CPPS),
        *(replace(rule, flavours=(OLLAMA,)) for rule in _OLLAMAS),
    ),
)


OLDER = replace(
    CONVERSION,
    serves=("GlmForCausalLM",),
    model_types=("glm",),
    architecture="chatglm",
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        Rule("layers.{n}.mlp.gate_up_proj.weight", "blk.{n}.ffn_up.weight"),
        Rule("layers.{n}.mlp.down_proj.weight", "blk.{n}.ffn_down.weight"),
        *decoders.PRE_NORMS,
    ),
    heads=FLAVOURS,
)

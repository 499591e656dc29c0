"""GLM-4 0414: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion, Rule

CONVERSION = Conversion(
    serves=("Glm4ForCausalLM",),
    model_types=("glm4",),
    architecture="glm4",
    keys=decoders.KEYS,
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        Rule("layers.{n}.mlp.gate_up_proj.weight", "blk.{n}.ffn_up.weight"),
        Rule("layers.{n}.mlp.down_proj.weight", "blk.{n}.ffn_down.weight"),
        Rule("layers.{n}.input_layernorm.weight", "blk.{n}.attn_norm.weight"),
        Rule("layers.{n}.post_self_attn_layernorm.weight", "blk.{n}.post_attention_norm.weight"),
        Rule("layers.{n}.post_attention_layernorm.weight", "blk.{n}.ffn_norm.weight"),
        Rule("layers.{n}.post_mlp_layernorm.weight", "blk.{n}.post_ffw_norm.weight"),
    ),
    drop=decoders.BUFFERS,
    defaults={"partial_rotary_factor": 0.5, "head_dim": 128},
    check=checks.only_scalings(),
)

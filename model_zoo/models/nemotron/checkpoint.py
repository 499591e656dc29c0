"""Nemotron 4 and Minitron: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import FLAVOURS, Conversion, Rule

CONVERSION = Conversion(
    serves=("NemotronForCausalLM",),
    model_types=("nemotron",),
    architecture="nemotron",
    keys=(*decoders.layer_normed("norm_eps"), *decoders.LINEAR_SCALING),
    rules=(
        *decoders.EMBEDDINGS_PLUS_ONE,
        Rule("norm.bias", "output_norm.bias"),
        *decoders.attention(),
        *decoders.feed_forward()[1:],
        *decoders.PRE_NORMS_PLUS_ONE,
        Rule("layers.{n}.input_layernorm.bias", "blk.{n}.attn_norm.bias"),
        Rule("layers.{n}.post_attention_layernorm.bias", "blk.{n}.ffn_norm.bias"),
    ),
    spellings={"partial_rotary_factor": "rope_percent"},
    defaults={"partial_rotary_factor": 0.5, "norm_eps": 1e-5},
    check=checks.all_of(checks.only_scalings("linear"), checks.only_values(hidden_act="relu2")),
    heads=FLAVOURS,
)

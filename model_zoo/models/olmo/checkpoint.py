"""OLMo 1: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion, Key

CONVERSION = Conversion(
    serves=("OlmoForCausalLM",),
    model_types=("olmo",),
    architecture="olmo",
    keys=(
        *decoders.layer_normed(lambda c: 1e-5),  # of all models
        Key("attention.clamp_kqv", "clip_qkv", optional=True, of=float),
    ),
    rules=(
        decoders.EMBEDDINGS[0],
        decoders.EMBEDDINGS[2],
        *decoders.attention(rotated=True),
        *decoders.feed_forward(),
    ),
    check=checks.all_of(checks.only_scalings(), checks.only_values(hidden_act="silu")),
)

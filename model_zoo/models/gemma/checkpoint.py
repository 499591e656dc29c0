"""Gemma 1 and CodeGemma: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion

CONVERSION = Conversion(
    serves=("GemmaForCausalLM",),
    architecture="gemma",
    keys=decoders.KEYS,
    rules=(
        *decoders.EMBEDDINGS_PLUS_ONE,
        *decoders.attention(),
        *decoders.feed_forward(),
        *decoders.PRE_NORMS_PLUS_ONE,
    ),
    defaults={"tie_word_embeddings": True, "head_dim": 256},
    check=checks.only_scalings(),
)

"""Qwen 2: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion

CONVERSION = Conversion(
    serves=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    architecture="qwen2",
    keys=(*decoders.KEYS, *decoders.YARN_SCALING),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.feed_forward(),
        *decoders.PRE_NORMS,
    ),
    drop=decoders.BUFFERS,
    check=checks.all_of(checks.only_scalings("yarn"), checks.no_windows),
)

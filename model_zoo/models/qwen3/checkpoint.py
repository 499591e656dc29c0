"""Qwen 3: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion

CONVERSION = Conversion(
    serves=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    architecture="qwen3",
    keys=(*decoders.KEYS, *decoders.YARN_SCALING),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.feed_forward(),
        *decoders.PRE_NORMS,
        *decoders.HEAD_NORMS,
    ),
    drop=decoders.BUFFERS,
    check=checks.all_of(checks.only_scalings("yarn"), checks.no_windows),
)

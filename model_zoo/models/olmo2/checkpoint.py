"""OLMo 2: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion

CONVERSION = Conversion(
    serves=("Olmo2ForCausalLM",),
    model_types=("olmo2",),
    architecture="olmo2",
    keys=(*decoders.KEYS, *decoders.YARN_SCALING),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.feed_forward(),
        *decoders.HEAD_NORMS,
        *decoders.POST_NORMS,
    ),
    drop=decoders.BUFFERS,
    check=checks.only_scalings("yarn"),
)

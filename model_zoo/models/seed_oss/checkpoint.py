"""Seed-OSS: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion

CONVERSION = Conversion(
    serves=("SeedOssForCausalLM",),
    model_types=("seed_oss",),
    architecture="seed_oss",
    keys=(*decoders.KEYS, *decoders.YARN_SCALING),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.feed_forward(),
        *decoders.POST_ATTENTION_NORMS,
    ),
    check=checks.only_scalings("yarn"),
)

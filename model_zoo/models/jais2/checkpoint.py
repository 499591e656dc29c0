"""Jais 2: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion

CONVERSION = Conversion(
    serves=("Jais2ForCausalLM",),
    model_types=("jais2",),
    architecture="jais2",
    keys=decoders.layer_normed(),
    rules=(
        *decoders.EMBEDDINGS_AND_BIASED_NORM,
        *decoders.attention(),
        *decoders.feed_forward()[1:],
        *decoders.BIASED_PRE_NORMS,
    ),
    check=checks.all_of(checks.only_scalings(), checks.only_values(hidden_act="relu2")),
)

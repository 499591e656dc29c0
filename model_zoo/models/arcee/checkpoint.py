"""AFM of Arcee: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion

CONVERSION = Conversion(
    serves=("ArceeForCausalLM",),
    model_types=("arcee",),
    architecture="arcee",
    keys=(*decoders.KEYS, *decoders.YARN_SCALING),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(rotated=True),
        *decoders.feed_forward()[1:],
        *decoders.PRE_NORMS,
    ),
    computed=(decoders.LLAMA3_FACTORS,),
    check=checks.all_of(
        checks.only_scalings("llama3", "yarn"), checks.only_values(hidden_act="relu2")
    ),
)

"""SmolLM3: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion

CONVERSION = Conversion(
    serves=("SmolLM3ForCausalLM",),
    model_types=("smollm3",),
    architecture="smollm3",
    keys=(*decoders.KEYS, *decoders.YARN_SCALING),
    rules=decoders.llama_rules(rotated=True),
    defaults={"tie_word_embeddings": True},
    check=checks.all_of(
        checks.only_scalings("yarn"), checks.no_windows, checks.every_nth_unrotated(4)
    ),
)

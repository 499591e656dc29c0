"""EXAONE 4, and the text model of EXAONE 4.5: conversion of checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key


def _windows(config: Configuration) -> list[bool] | None:
    """Whether each layer has a window; None if the checkpoint states no window."""
    return None if config.get("sliding_window") is None else decoders.windows(config, every=4)


CONVERSION = Conversion(
    serves=("Exaone4ForCausalLM", "Exaone4_5_ForConditionalGeneration"),
    model_types=("exaone4", "exaone4_5_text"),
    architecture="exaone4",
    keys=(
        *decoders.KEYS,
        Key("attention.sliding_window", "sliding_window", optional=True),
        Key("attention.sliding_window_pattern", _windows),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.feed_forward(),
        *decoders.POST_NORMS,
        *decoders.HEAD_NORMS,
    ),
    computed=(decoders.LLAMA3_FACTORS,),
    drop=(*decoders.OTHER_PARTS, "mtp.**"),
    check=checks.only_scalings("llama3"),
)

"""Command-R, Command-R+ and Command R7B: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule


def _context(config: Configuration) -> int:
    """Settings of Command-R and Command-R+ state the trained context as `model_max_length`, and
    8,192 as the number of positions."""
    stated = config.get("model_max_length")
    return config.require_size("max_position_embeddings" if stated is None else "model_max_length")


_RULES = (
    *decoders.EMBEDDINGS,
    *decoders.attention(),
    *decoders.feed_forward(),
    Rule("layers.{n}.input_layernorm.weight", "blk.{n}.attn_norm.weight"),
)
CONVERSION = Conversion(
    serves=("CohereForCausalLM",),
    model_types=("cohere",),
    architecture="command-r",
    keys=(
        *(key for key in decoders.layer_normed() if key.name != "context_length"),
        Key("context_length", _context),
        Key("logit_scale", "logit_scale", of=float),
    ),
    rules=(*_RULES, *decoders.STATED_HEAD_NORMS),
    defaults={"tie_word_embeddings": True, "logit_scale": 0.0625, "layer_norm_eps": 1e-5},
    check=checks.only_scalings(),
)

WINDOWED = replace(
    CONVERSION,
    serves=("Cohere2ForCausalLM",),
    model_types=("cohere2",),
    architecture="cohere2",
    keys=(
        *CONVERSION.keys,
        Key("attention.sliding_window", "sliding_window"),
        Key("attention.sliding_window_pattern", decoders.unusual_windows(4)),
    ),
    rules=_RULES,
    defaults={**CONVERSION.defaults, "sliding_window": 4096},
)

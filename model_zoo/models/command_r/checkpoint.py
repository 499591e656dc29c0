"""Command-R, Command-R+ and Command R7B: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule


def _norms_heads(config: Configuration, layer: int) -> bool:
    return bool(config.get("use_qk_norm"))


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
        *decoders.layer_normed(),
        Key("logit_scale", "logit_scale", of=float),
    ),
    rules=(*_RULES, *(replace(rule, only=_norms_heads) for rule in decoders.HEAD_NORMS)),
    drop=decoders.BUFFERS,
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

"""Command-R and Command R7B: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule
from runtime.errors import UnsupportedModelError


def _no_head_norms(config: Configuration) -> None:
    if config.get("use_qk_norm"):
        raise UnsupportedModelError(
            f"{config.path}: norms of queries and keys (`use_qk_norm`, Command-R+) are not "
            "supported."
        )


CONVERSION = Conversion(
    serves=("CohereForCausalLM",),
    model_types=("cohere",),
    architecture="command-r",
    keys=(
        *(key for key in decoders.KEYS if key.name != "attention.layer_norm_rms_epsilon"),
        Key("attention.layer_norm_epsilon", "layer_norm_eps", of=float),
        Key("logit_scale", "logit_scale", of=float),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.feed_forward(),
        Rule("layers.{n}.input_layernorm.weight", "blk.{n}.attn_norm.weight"),
    ),
    drop=decoders.BUFFERS,
    defaults={"tie_word_embeddings": True, "logit_scale": 0.0625, "layer_norm_eps": 1e-5},
    check=checks.all_of(checks.only_scalings(), _no_head_norms),
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
    defaults={**CONVERSION.defaults, "sliding_window": 4096},
    check=checks.only_scalings(),
)

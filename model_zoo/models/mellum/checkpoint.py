"""Mellum 2: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key
from model_zoo.models.mellum.text import NEAR_BASE
from runtime.errors import UnsupportedModelError


def _experts_everywhere(config: Configuration) -> None:
    if "dense" in (config.get("mlp_layer_types") or ()):
        raise UnsupportedModelError(
            f"{config.path}: has layers without experts, which this architecture's files cannot "
            "express."
        )


def _plain_windows(config: Configuration) -> None:
    kind = config.rope("sliding_attention")["rope_type"]
    if kind != "default":
        raise UnsupportedModelError(
            f"{config.path}: layers with a window have the rope scaling {kind}; in files of this "
            "architecture they have none."
        )


CONVERSION = Conversion(
    serves=("MellumForCausalLM",),
    model_types=("mellum",),
    architecture={LLAMA_CPP: "mellum"},
    keys=(
        *decoders.KEYS,
        *decoders.YARN_SCALING,
        *decoders.EXPERT_COUNTS,
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("attention.sliding_window", "sliding_window", optional=True),
        Key("attention.sliding_window_pattern", lambda c: decoders.windows(c, every=4)),
        Key(NEAR_BASE, lambda c: decoders.rope_base(c, "sliding_attention")),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.experts(),
        *decoders.PRE_NORMS,
        *decoders.HEAD_NORMS,
    ),
    drop=("mtp.**",),
    check=checks.all_of(
        checks.only_scalings("yarn"),
        checks.only_values(norm_topk_prob=True),
        _experts_everywhere,
        _plain_windows,
    ),
    heads=(LLAMA_CPP,),
)

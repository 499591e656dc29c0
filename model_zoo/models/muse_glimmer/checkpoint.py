"""Muse Glimmer: conversion of text model checkpoints to GGUF."""

import torch
from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.models.muse_glimmer.text import POST_NORM_EPS

_FULL_EVERY = 4  # counted from the last layer


def _windows(config: Configuration) -> list[bool]:
    """Whether each layer has a window: as listed, else all but every fourth from the last."""
    listed = config.layer_types()
    if listed is None:
        return [layer % _FULL_EVERY != 0 for layer in reversed(range(config.layers))]
    return [kind == "sliding_attention" for kind in listed]


def _only_windows_rotated(config: Configuration) -> None:
    listed = config.get("layer_rope_theta")
    base = decoders.rope_base(config)
    if listed and [float(each) for each in listed] != [base * near for near in _windows(config)]:
        raise config.error("has a `layer_rope_theta` other than `rope_theta` with windows, else 0")


def _query_factors(config: Configuration, queries: Tensor) -> Tensor:
    """Weights of the norm of queries, [head_dim], from the factor of all of them."""
    factor = float(config.require("qk_scale_factor"))
    return torch.full((config.head_dim,), factor, device=queries.device)


def _ones(config: Configuration, keys: Tensor) -> Tensor:
    return torch.ones(config.head_dim, device=keys.device)


CONVERSION = Conversion(
    serves=("MuseGlimmerForConditionalGeneration",),
    model_types=("muse_glimmer_text",),
    architecture={LLAMA_CPP: "muse-glimmer"},
    keys=(
        *decoders.KEYS,
        Key("attention.sliding_window", "sliding_window"),
        Key("attention.sliding_window_pattern", _windows),
        Key("final_logit_softcapping", "final_logit_softcapping", of=float),
        Key("logit_scale", "output_multiplier", of=float),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(rotated=True),
        Rule("layers.{n}.self_attn.gate_proj.weight", "blk.{n}.attn_gate.weight"),
        Rule("layers.{n}.self_attn.q_proj.weight", "blk.{n}.attn_q_norm.weight", _query_factors),
        Rule("layers.{n}.self_attn.k_proj.weight", "blk.{n}.attn_k_norm.weight", _ones),
        *decoders.feed_forward(),
        *decoders.NORMS_PLUS_ONE,
    ),
    drop=(*decoders.OTHER_PARTS, "vision_adapter.**"),
    defaults={
        "sliding_window": 2048,
        "final_logit_softcapping": 20.0,
        "qk_scale_factor": 3.87,
        "output_multiplier": 256**0.5 / 6656**0.5,
    },
    check=checks.all_of(
        checks.only_scalings(),
        checks.only_values(post_norm_eps=POST_NORM_EPS, attention_bias=False),
        _only_windows_rotated,
    ),
    heads=(LLAMA_CPP,),
)

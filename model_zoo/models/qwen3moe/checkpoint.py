"""Qwen 3 MoE: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion, Key

CONVERSION = Conversion(
    serves=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    architecture="qwen3moe",
    keys=(
        *decoders.KEYS,
        *decoders.YARN_SCALING,
        *decoders.EXPERT_COUNTS,
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("expert_weights_norm", "norm_topk_prob", of=bool),
        Key("norm_top_k_prob", "norm_topk_prob", of=bool),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.experts(),
        *decoders.PRE_NORMS,
        *decoders.HEAD_NORMS,
    ),
    defaults={"norm_topk_prob": False},
    check=checks.all_of(checks.only_scalings("yarn"), checks.no_windows, checks.experts_everywhere),
)

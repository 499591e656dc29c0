"""Qwen 1.5 MoE and Qwen 2 57B: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import FLAVOURS, Conversion, Key

CONVERSION = Conversion(
    serves=("Qwen2MoeForCausalLM",),
    model_types=("qwen2_moe",),
    architecture="qwen2moe",
    keys=(
        *decoders.KEYS,
        *decoders.YARN_SCALING,
        *decoders.EXPERT_COUNTS,
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        Key("expert_weights_norm", "norm_topk_prob", of=bool),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.experts(),
        *decoders.GATED_SHARED_EXPERT,
        *decoders.PRE_NORMS,
    ),
    defaults={"norm_topk_prob": False},
    check=checks.all_of(
        checks.only_scalings("yarn"),
        checks.no_windows,
        checks.experts_everywhere,
        checks.only_values(qkv_bias=True),
    ),
    heads=FLAVOURS,
)

"""DeepSeek MoE 16B: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import FLAVOURS, Conversion, Key

CONVERSION = Conversion(
    serves=("DeepseekForCausalLM",),
    model_types=("deepseek",),
    architecture="deepseek",
    keys=(
        *decoders.KEYS,
        *decoders.LEADING_DENSE_KEYS,
        Key("expert_weights_norm", "norm_topk_prob", of=bool),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(rotated=True),
        *decoders.LEADING_DENSE,
        *decoders.PRE_NORMS,
    ),
    defaults={
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    check=checks.all_of(
        checks.only_scalings(),
        checks.only_values(moe_layer_freq=1, scoring_func="softmax", hidden_act="silu"),
    ),
    heads=FLAVOURS,
)

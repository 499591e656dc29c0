"""Phi 3.5 MoE: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders, longrope
from model_zoo.convert.mapping import FLAVOURS, Conversion, Key, Rule

CONVERSION = Conversion(
    serves=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    model_types=("phimoe",),
    architecture="phimoe",
    keys=(
        *decoders.KEYS,
        *decoders.EXPERT_COUNTS,
        Key("attention.sliding_window", "sliding_window", optional=True),
        *longrope.keys(longrope.PHI),
    ),
    rules=(
        *decoders.EMBEDDINGS_AND_BIASED_NORM,
        Rule("lm_head.bias", "output.bias"),
        *decoders.attention(),
        *decoders.experts("block_sparse_moe", names=("w1", "w3", "w2")),
        *decoders.BIASED_PRE_NORMS,
    ),
    computed=longrope.factors(longrope.PHI),
    check=checks.all_of(
        checks.only_scalings(*longrope.PHI),
        checks.only_values(
            attention_bias=True,
            lm_head_bias=True,
            router_jitter_noise=0.01,
            hidden_act="silu",
        ),
    ),
    heads=FLAVOURS,
)

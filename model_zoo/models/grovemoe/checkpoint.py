"""GroveMoE: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion, Key, Rule

# Constants of the authors' code.
PER_GROUP, WIDTH, SCALE = 2, 128, 0.05

CONVERSION = Conversion(
    serves=("GroveMoeForCausalLM", "modeling_grove_moe.GroveMoeForCausalLM"),
    architecture="grovemoe",
    keys=(
        *decoders.KEYS,
        *decoders.YARN_SCALING,
        *decoders.EXPERT_COUNTS,
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("expert_chunk_feed_forward_length", lambda c: WIDTH),
        Key("experts_per_group", lambda c: PER_GROUP),
        Key("expert_group_scale", lambda c: SCALE),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.experts(),
        *(
            Rule(
                f"layers.{{n}}.mlp.chunk_experts.{{e}}.{name}_proj.weight",
                f"blk.{{n}}.ffn_{name}_chexps.weight",
            )
            for name in ("gate", "up", "down")
        ),
        *decoders.PRE_NORMS,
        *decoders.HEAD_NORMS,
    ),
    # Zeros, which the authors' code does not use.
    drop=("layers.{n}.mlp.expert_bias",),
    check=checks.all_of(
        checks.only_scalings("yarn"),
        checks.no_windows,
        checks.experts_everywhere,
        checks.only_values(hidden_act="silu"),
    ),
)

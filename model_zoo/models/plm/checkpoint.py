"""PLM: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders, latent_rules
from model_zoo.convert.mapping import Conversion, Key, Rule

CONVERSION = Conversion(
    serves=("PLMForCausalLM",),
    architecture="plm",
    keys=(
        *decoders.SIZES,
        Key("attention.key_length", latent_rules.query_size),
        Key("attention.value_length", "v_head_dim"),
        Key("attention.kv_lora_rank", "kv_lora_rank"),
        Key("rope.dimension_count", "qk_rope_head_dim"),
        decoders.ROPE_BASE,
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *latent_rules.projections(),
        Rule(f"{latent_rules.ATTENTION}.kv_b_proj.weight", "blk.{n}.attn_kv_b.weight"),
        *decoders.feed_forward()[1:],
        *decoders.PRE_NORMS,
    ),
    check=checks.all_of(
        checks.only_scalings(), checks.only_values(hidden_act="relu2", q_lora_rank=None)
    ),
)

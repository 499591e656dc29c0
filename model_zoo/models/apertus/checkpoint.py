"""Apertus: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, GatheredKey, Rule

CONVERSION = Conversion(
    serves=("ApertusForCausalLM",),
    model_types=("apertus",),
    architecture="apertus",
    keys=decoders.KEYS,
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.feed_forward()[1:],
        Rule("layers.{n}.attention_layernorm.weight", "blk.{n}.attn_norm.weight"),
        Rule("layers.{n}.feedforward_layernorm.weight", "blk.{n}.ffn_norm.weight"),
        *decoders.HEAD_NORMS,
    ),
    computed=(decoders.LLAMA3_FACTORS,),
    gathered=tuple(
        GatheredKey(f"xielu.{name}", f"layers.{{n}}.mlp.act_fn.{name}")
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    ),
    check=checks.all_of(
        checks.only_scalings("llama3"),
        checks.only_values(hidden_act="xielu", qk_norm=True, post_norm=False),
    ),
    heads=(LLAMA_CPP,),
)

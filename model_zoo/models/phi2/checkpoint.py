"""Phi 1, 1.5 and 2: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import FLAVOURS, Conversion, Rule

CONVERSION = Conversion(
    serves=("PhiForCausalLM",),
    model_types=("phi",),
    architecture="phi2",
    keys=decoders.layer_normed(),
    rules=(
        *decoders.EMBEDDINGS[::2],
        Rule("lm_head.bias", "output.bias"),
        Rule("final_layernorm.*", "output_norm.*"),
        *decoders.attention()[:3],
        Rule("layers.{n}.self_attn.dense.*", "blk.{n}.attn_output.*"),
        Rule("layers.{n}.mlp.fc1.*", "blk.{n}.ffn_up.*"),
        Rule("layers.{n}.mlp.fc2.*", "blk.{n}.ffn_down.*"),
        decoders.BIASED_PRE_NORMS[0],
    ),
    defaults={"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    check=checks.all_of(
        checks.only_scalings(), checks.only_values(qk_layernorm=False, hidden_act="gelu_new")
    ),
    heads=FLAVOURS,
)

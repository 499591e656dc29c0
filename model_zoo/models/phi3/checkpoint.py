"""Phi-3: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders, longrope
from model_zoo.convert.mapping import Conversion, Key, Rule

CONVERSION = Conversion(
    serves=("Phi3ForCausalLM",),
    model_types=("phi3",),
    architecture="phi3",
    keys=(
        *decoders.KEYS,
        Key("attention.sliding_window", "sliding_window", optional=True),
        *longrope.keys(longrope.PHI),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        Rule("layers.{n}.self_attn.qkv_proj.weight", "blk.{n}.attn_qkv.weight"),
        Rule("layers.{n}.self_attn.o_proj.weight", "blk.{n}.attn_output.weight"),
        Rule("layers.{n}.mlp.gate_up_proj.weight", "blk.{n}.ffn_up.weight"),
        Rule("layers.{n}.mlp.down_proj.weight", "blk.{n}.ffn_down.weight"),
        *decoders.PRE_NORMS,
    ),
    computed=longrope.factors(longrope.PHI),
    nested={
        "phi3": {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        }
    },
    check=checks.only_scalings(*longrope.PHI),
)

"""Qwen 3: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion

CONVERSION = Conversion(
    serves=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    architecture="qwen3",
    keys=(*decoders.KEYS, *decoders.YARN_SCALING),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.feed_forward(),
        *decoders.PRE_NORMS,
        *decoders.HEAD_NORMS,
    ),
    drop=decoders.BUFFERS,
    nested={
        "qwen3": {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
        }
    },
    check=checks.all_of(checks.only_scalings("yarn"), checks.no_windows),
)

"""Qwen 2: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion

CONVERSION = Conversion(
    serves=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    architecture="qwen2",
    keys=(*decoders.KEYS, *decoders.YARN_SCALING),
    rules=decoders.llama_rules(),
    nested={
        "qwen2": {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
        }
    },
    check=checks.all_of(checks.only_scalings("yarn"), checks.no_windows),
)

"""Llama, Mistral and Mixtral: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}

CONVERSION = Conversion(
    serves=("LlamaForCausalLM", "MistralForCausalLM"),
    model_types=("llama", "mistral"),
    architecture="llama",
    keys=(*decoders.KEYS, *decoders.LINEAR_SCALING, *decoders.YARN_SCALING),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(rotated=True),
        *decoders.feed_forward(),
        *decoders.PRE_NORMS,
    ),
    computed=(decoders.LLAMA3_FACTORS,),
    drop=decoders.BUFFERS,
    nested={"llama": _LLAMA, "mistral": _MISTRAL},
    check=checks.only_scalings("linear", "llama3", "yarn"),
)


MIXTRAL = replace(
    CONVERSION,
    serves=("MixtralForCausalLM",),
    model_types=("mixtral",),
    keys=(*CONVERSION.keys, *decoders.EXPERT_COUNTS),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(rotated=True),
        *decoders.experts("block_sparse_moe", names=("w1", "w3", "w2")),
        *decoders.PRE_NORMS,
    ),
    nested={},
)

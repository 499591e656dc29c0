"""Llama, Mistral and Mixtral: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion

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
)

"""dots.llm1: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import LLAMA_CPP, Conversion

CONVERSION = Conversion(
    serves=("Dots1ForCausalLM",),
    model_types=("dots1",),
    architecture="dots1",
    keys=(*decoders.KEYS, *decoders.LEADING_DENSE_KEYS, *decoders.SIGMOID_KEYS),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.LEADING_DENSE,
        decoders.EXPERT_BIAS,
        *decoders.PRE_NORMS,
        *decoders.HEAD_NORMS,
    ),
    defaults={"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    check=checks.all_of(checks.only_scalings(), checks.no_windows),
    heads=(LLAMA_CPP,),
)

"""StarCoder 2: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion, Key, Rule

CONVERSION = Conversion(
    serves=("Starcoder2ForCausalLM",),
    model_types=("starcoder2",),
    architecture="starcoder2",
    keys=(
        *decoders.layer_normed("norm_epsilon"),
        Key("attention.sliding_window", "sliding_window", optional=True),
    ),
    rules=(
        *decoders.EMBEDDINGS_AND_BIASED_NORM,
        *decoders.attention(),
        Rule("layers.{n}.mlp.c_fc.*", "blk.{n}.ffn_up.*"),
        Rule("layers.{n}.mlp.c_proj.*", "blk.{n}.ffn_down.*"),
        *decoders.BIASED_PRE_NORMS,
    ),
    defaults={"tie_word_embeddings": True, "norm_epsilon": 1e-5},
    check=checks.all_of(
        checks.only_scalings(), checks.only_values(use_bias=True, hidden_act="gelu_pytorch_tanh")
    ),
)

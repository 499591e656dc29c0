"""Granite 3: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion, Key, Rule
from model_zoo.convert.transforms import first_half, second_half

_EXPERTS = "layers.{n}.block_sparse_moe"

CONVERSION = Conversion(
    serves=("GraniteForCausalLM",),
    model_types=("granite",),
    architecture="granite",
    keys=(
        *decoders.KEYS,
        Key("attention.scale", "attention_multiplier", of=float),
        Key("embedding_scale", "embedding_multiplier", of=float),
        Key("residual_scale", "residual_multiplier", of=float),
        Key("logit_scale", "logits_scaling", of=float),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(rotated=True),
        *decoders.feed_forward(),
        *decoders.PRE_NORMS,
    ),
    drop=decoders.BUFFERS,
    defaults={
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    check=checks.only_scalings(),
)

WITH_EXPERTS = replace(
    CONVERSION,
    serves=("GraniteMoeForCausalLM",),
    model_types=("granitemoe",),
    architecture="granitemoe",
    keys=(*CONVERSION.keys, *decoders.EXPERT_COUNTS),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(rotated=True),
        Rule(f"{_EXPERTS}.router.layer.weight", "blk.{n}.ffn_gate_inp.weight"),
        # The rows of the gate precede those of up.
        Rule(
            f"{_EXPERTS}.input_linear.weight",
            "blk.{n}.ffn_gate_exps.weight",
            first_half,
            each=True,
        ),
        Rule(
            f"{_EXPERTS}.input_linear.weight",
            "blk.{n}.ffn_up_exps.weight",
            second_half,
            each=True,
        ),
        Rule(f"{_EXPERTS}.output_linear.weight", "blk.{n}.ffn_down_exps.weight"),
        *decoders.PRE_NORMS,
    ),
)

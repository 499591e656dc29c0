"""Mamba and Falcon Mamba: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, recurrent_models, selective_scans
from model_zoo.convert.mapping import LLAMA_CPP, TEXT_ROOTS, Conversion, Key
from model_zoo.models.mamba.text import SELECTION_EPS

NORMED = "ssm.dt_b_c_rms"

CONVERSION = Conversion(
    serves=("MambaForCausalLM",),
    architecture={LLAMA_CPP: "mamba"},
    keys=(
        *recurrent_models.KEYS,
        *selective_scans.keys(expansion="expand", state="state_size", taps="conv_kernel"),
        Key(NORMED, lambda c: False),
    ),
    rules=(
        *recurrent_models.RULES,
        *selective_scans.rules("mixer"),
    ),
    roots=("backbone.", *TEXT_ROOTS),
    # Those of `transformers`, with which the authors' checkpoints were saved.
    defaults={"tie_word_embeddings": True, "expand": 2, "state_size": 16, "conv_kernel": 4},
    check=checks.only_values(hidden_act="silu"),
)

FALCON = replace(
    CONVERSION,
    serves=("FalconMambaForCausalLM",),
    keys=(*CONVERSION.keys[:-1], Key(NORMED, lambda c: True)),
    check=checks.only_values(hidden_act="silu", mixer_rms_eps=SELECTION_EPS),
)

"""Mamba 2: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import recurrent_models, state_spaces
from model_zoo.convert.mapping import LLAMA_CPP, TEXT_ROOTS, Conversion

CONVERSION = Conversion(
    serves=("Mamba2ForCausalLM",),
    architecture={LLAMA_CPP: "mamba2"},
    keys=(
        *recurrent_models.KEYS,
        *state_spaces.keys(
            heads="num_heads",
            head_dim="head_dim",
            groups="n_groups",
            state="state_size",
            taps="conv_kernel",
        ),
    ),
    rules=(
        *recurrent_models.RULES,
        *state_spaces.rules("mixer", groups="n_groups"),
    ),
    roots=("model.backbone.", "backbone.", *TEXT_ROOTS),
    check=state_spaces.unlimited_steps,
)

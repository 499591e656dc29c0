"""Mamba 2: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import state_spaces
from model_zoo.convert.mapping import LLAMA_CPP, OUTPUT, TEXT_ROOTS, Conversion, Key, Rule

CONTEXT = 1 << 20  # what llama.cpp's converter writes; the checkpoints state none

CONVERSION = Conversion(
    serves=("Mamba2ForCausalLM",),
    architecture={LLAMA_CPP: "mamba2"},
    keys=(
        Key("block_count", "num_hidden_layers"),
        Key("context_length", lambda c: CONTEXT),
        Key("embedding_length", "hidden_size"),
        # llama.cpp requires them.
        Key("feed_forward_length", lambda c: 0),
        Key("attention.head_count", lambda c: 0),
        Key("attention.layer_norm_rms_epsilon", "layer_norm_epsilon", of=float),
        Key("vocab_size", "vocab_size"),
        *state_spaces.keys(
            heads="num_heads",
            head_dim="head_dim",
            groups="n_groups",
            state="state_size",
            taps="conv_kernel",
        ),
    ),
    rules=(
        Rule("embeddings.weight", "token_embd.weight"),
        Rule("norm_f.weight", "output_norm.weight"),
        Rule("lm_head.weight", OUTPUT),
        Rule("layers.{n}.norm.weight", "blk.{n}.attn_norm.weight"),
        *state_spaces.rules("mixer", groups="n_groups"),
    ),
    roots=("model.backbone.", "backbone.", *TEXT_ROOTS),
    check=state_spaces.unlimited_steps,
)

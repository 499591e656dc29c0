"""Mamba and Falcon Mamba: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, selective_scans
from model_zoo.convert.mapping import LLAMA_CPP, OUTPUT, TEXT_ROOTS, Conversion, Key, Rule
from model_zoo.models.mamba.text import SELECTION_EPS

CONTEXT = 1 << 20  # what llama.cpp's converter writes; the checkpoints state none
NORMED = "ssm.dt_b_c_rms"

CONVERSION = Conversion(
    serves=("MambaForCausalLM",),
    architecture={LLAMA_CPP: "mamba"},
    keys=(
        Key("block_count", "num_hidden_layers"),
        Key("context_length", lambda c: CONTEXT),
        Key("embedding_length", "hidden_size"),
        # llama.cpp requires them.
        Key("feed_forward_length", lambda c: 0),
        Key("attention.head_count", lambda c: 0),
        Key("attention.layer_norm_rms_epsilon", "layer_norm_epsilon", of=float),
        Key("vocab_size", "vocab_size"),
        *selective_scans.keys(expansion="expand", state="state_size", taps="conv_kernel"),
        Key(NORMED, lambda c: False),
    ),
    rules=(
        Rule("embeddings.weight", "token_embd.weight"),
        Rule("norm_f.weight", "output_norm.weight"),
        Rule("lm_head.weight", OUTPUT),
        Rule("layers.{n}.norm.weight", "blk.{n}.attn_norm.weight"),
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

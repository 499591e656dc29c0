"""Gemma 2: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion, Key

CONVERSION = Conversion(
    serves=("Gemma2ForCausalLM",),
    architecture="gemma2",
    keys=(
        *decoders.KEYS,
        Key("attention.sliding_window", "sliding_window"),
        # If a file does not state caps, readers use those of the published checkpoints.
        Key("attn_logit_softcapping", lambda c: float(c.get("attn_logit_softcapping", 0.0))),
        Key("final_logit_softcapping", lambda c: float(c.get("final_logit_softcapping", 0.0))),
    ),
    rules=(
        *decoders.EMBEDDINGS_PLUS_ONE,
        *decoders.attention(),
        *decoders.feed_forward(),
        *decoders.NORMS_PLUS_ONE,
    ),
    defaults={"tie_word_embeddings": True, "query_pre_attn_scalar": 256, "head_dim": 256},
    check=checks.all_of(
        checks.only_scalings(), checks.known_query_scale(46), checks.every_nth_full(2)
    ),
)

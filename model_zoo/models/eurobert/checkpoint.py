"""EuroBERT: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion, Key

CONVERSION = Conversion(
    serves=("EuroBertModel", "EuroBertForMaskedLM"),
    architecture="eurobert",
    keys=(*decoders.KEYS, Key("attention.causal", lambda c: False)),
    rules=(
        *decoders.EMBEDDINGS[:2],
        *decoders.attention(),
        *decoders.feed_forward(),
        *decoders.PRE_NORMS,
    ),
    drop=("lm_head.**",),
    check=checks.all_of(checks.only_scalings(), checks.only_values(hidden_act="silu")),
)

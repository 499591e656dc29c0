"""Jina Embeddings v3: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, encoders
from model_zoo.convert.mapping import Conversion
from model_zoo.models.jina_bert_v3.text import DEFAULT_BASE, DEFAULT_EPS

CONVERSION = Conversion(
    serves=("JinaEmbeddingsV3Model", "JinaEmbeddingsV3ForMaskedLM"),
    architecture="jina-bert-v3",
    keys=encoders.ROTATED_KEYS,
    rules=encoders.joined_rules("mixer", {"ffn_up": "fc1", "ffn_down": "fc2"}),
    roots=("roberta.",),
    drop=encoders.UNUSED,
    spellings={"rope_theta": "rotary_emb_base"},
    defaults={"layer_norm_eps": DEFAULT_EPS, "rope_theta": DEFAULT_BASE},
    check=checks.all_of(checks.only_scalings(), checks.only_values(hidden_act="gelu")),
)

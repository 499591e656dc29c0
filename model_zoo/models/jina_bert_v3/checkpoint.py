"""Jina Embeddings v3: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders, encoders
from model_zoo.convert.mapping import Conversion, Key, Rule
from model_zoo.models.jina_bert_v3.text import DEFAULT_BASE, DEFAULT_EPS

CONVERSION = Conversion(
    serves=("JinaEmbeddingsV3Model", "JinaEmbeddingsV3ForMaskedLM"),
    architecture="jina-bert-v3",
    keys=(
        *encoders.KEYS,
        Key("attention.layer_norm_epsilon", "layer_norm_eps", of=float),
        Key("rope.freq_base", decoders.rope_base),
    ),
    rules=(
        *encoders.EMBEDDINGS,
        Rule("emb_ln.*", "token_embd_norm.*"),
        Rule("encoder.layers.{n}.mixer.Wqkv.*", "blk.{n}.attn_qkv.*"),
        Rule("encoder.layers.{n}.mixer.out_proj.*", "blk.{n}.attn_output.*"),
        Rule("encoder.layers.{n}.norm1.*", "blk.{n}.attn_output_norm.*"),
        Rule("encoder.layers.{n}.mlp.fc1.*", "blk.{n}.ffn_up.*"),
        Rule("encoder.layers.{n}.mlp.fc2.*", "blk.{n}.ffn_down.*"),
        Rule("encoder.layers.{n}.norm2.*", "blk.{n}.layer_output_norm.*"),
    ),
    roots=("roberta.",),
    drop=encoders.UNUSED,
    spellings={"rope_theta": "rotary_emb_base"},
    defaults={"layer_norm_eps": DEFAULT_EPS, "rope_theta": DEFAULT_BASE},
    check=checks.all_of(checks.only_scalings(), checks.only_values(hidden_act="gelu")),
)

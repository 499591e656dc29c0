"""BERT: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import encoders
from model_zoo.convert.mapping import Conversion, Key, Rule
from model_zoo.models.bert.text import DEFAULT_EPS

CONVERSION = Conversion(
    serves=("BertModel", "BertForMaskedLM"),
    architecture="bert",
    keys=(
        *encoders.KEYS,
        Key("attention.layer_norm_epsilon", "layer_norm_eps", of=float),
    ),
    rules=(
        *encoders.EMBEDDINGS,
        Rule("embeddings.position_embeddings.weight", "position_embd.weight"),
        Rule("embeddings.LayerNorm.*", "token_embd_norm.*"),
        Rule("encoder.layer.{n}.attention.self.query.*", "blk.{n}.attn_q.*"),
        Rule("encoder.layer.{n}.attention.self.key.*", "blk.{n}.attn_k.*"),
        Rule("encoder.layer.{n}.attention.self.value.*", "blk.{n}.attn_v.*"),
        Rule("encoder.layer.{n}.attention.output.dense.*", "blk.{n}.attn_output.*"),
        Rule("encoder.layer.{n}.attention.output.LayerNorm.*", "blk.{n}.attn_output_norm.*"),
        Rule("encoder.layer.{n}.intermediate.dense.*", "blk.{n}.ffn_up.*"),
        Rule("encoder.layer.{n}.output.dense.*", "blk.{n}.ffn_down.*"),
        Rule("encoder.layer.{n}.output.LayerNorm.*", "blk.{n}.layer_output_norm.*"),
    ),
    roots=("bert.",),
    drop=encoders.UNUSED,
    defaults={"layer_norm_eps": DEFAULT_EPS},
)

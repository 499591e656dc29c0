"""NomicBERT: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import decoders, encoders
from model_zoo.convert.mapping import Conversion, Key, Rule
from model_zoo.models.nomic_bert.text import DEFAULT_BASE, DEFAULT_EPS

CONVERSION = Conversion(
    serves=("NomicBertModel",),
    architecture="nomic-bert",
    keys=(
        *encoders.KEYS,
        Key("attention.layer_norm_epsilon", "layer_norm_eps", of=float),
        Key("rope.freq_base", decoders.rope_base),
    ),
    rules=(
        *encoders.EMBEDDINGS,
        Rule("emb_ln.*", "token_embd_norm.*"),
        Rule("encoder.layers.{n}.attn.Wqkv.*", "blk.{n}.attn_qkv.*"),
        Rule("encoder.layers.{n}.attn.out_proj.*", "blk.{n}.attn_output.*"),
        Rule("encoder.layers.{n}.norm1.*", "blk.{n}.attn_output_norm.*"),
        Rule("encoder.layers.{n}.mlp.fc11.*", "blk.{n}.ffn_up.*"),
        Rule("encoder.layers.{n}.mlp.fc12.*", "blk.{n}.ffn_gate.*"),
        Rule("encoder.layers.{n}.mlp.fc2.*", "blk.{n}.ffn_down.*"),
        Rule("encoder.layers.{n}.norm2.*", "blk.{n}.layer_output_norm.*"),
    ),
    roots=("bert.",),
    drop=encoders.UNUSED,
    spellings=encoders.GPT2_SPELLINGS,
    defaults={"layer_norm_eps": DEFAULT_EPS, "rope_theta": DEFAULT_BASE},
)

"""NomicBERT: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import decoders, encoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule
from model_zoo.models.nomic_bert.text import DEFAULT_BASE, DEFAULT_EPS
from runtime.errors import UnsupportedModelError


def _no_experts(config: Configuration) -> None:
    """Refuses experts, whose sum has a bias in checkpoints; GGUF files have no tensor for it, and
    llama.cpp's converter leaves it out."""
    if config.get("moe_every_n_layers"):
        raise UnsupportedModelError(
            f"{config.path}: has experts with a bias, which files cannot express; files of "
            "llama.cpp's converter, without the bias, are served."
        )


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
    check=_no_experts,
)

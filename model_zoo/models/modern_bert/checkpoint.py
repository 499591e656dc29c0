"""ModernBERT and its rerankers: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, decoders, encoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule
from model_zoo.gguf.pooling_types import CLS, MEAN
from model_zoo.layers.ranking_head import POOLING
from model_zoo.models.modern_bert.text import (
    CURVE,
    DEFAULT_EPS,
    FULL_EVERY,
    GATES,
    GLOBAL_BASE,
)
from runtime.errors import UnsupportedModelError


def _windows(config: Configuration) -> list[bool] | None:
    """Whether each layer has a window; None for all except the first of every three, which readers
    assume."""
    layers, listed = range(config.layers), config.layer_types()
    if listed is None:
        every = int(config.get("global_attn_every_n_layers", FULL_EVERY))
        stated = [layer % every > 0 for layer in layers]
    else:
        stated = [kind == "sliding_attention" for kind in listed]
    return None if stated == [layer % FULL_EVERY > 0 for layer in layers] else stated


def _known_curve(config: Configuration) -> None:
    curve = config.get("hidden_activation")
    if curve not in GATES:
        raise UnsupportedModelError(
            f"{config.path}: `hidden_activation` is {str(curve)[:40]}; {' and '.join(GATES)} are "
            "supported."
        )


_CHECK = checks.all_of(checks.only_scalings(), _known_curve)
CONVERSION = Conversion(
    serves=("ModernBertModel", "ModernBertForMaskedLM"),
    architecture="modern-bert",
    keys=(
        *encoders.KEYS,
        Key("attention.layer_norm_epsilon", "norm_eps", of=float),
        Key("attention.sliding_window", "local_attention"),
        Key("attention.sliding_window_pattern", _windows),
        Key("rope.freq_base", decoders.rope_base),
        Key("rope.freq_base_swa", decoders.local_rope_base),
        Key(CURVE, lambda c: str(c.require("hidden_activation"))),
    ),
    rules=(
        Rule("embeddings.tok_embeddings.weight", "token_embd.weight"),
        Rule("embeddings.norm.weight", "token_embd_norm.weight"),
        Rule("layers.{n}.attn_norm.weight", "blk.{n}.attn_norm.weight", only=lambda c, n: n > 0),
        Rule("layers.{n}.attn.Wqkv.weight", "blk.{n}.attn_qkv.weight"),
        Rule("layers.{n}.attn.Wo.weight", "blk.{n}.attn_output.weight"),
        Rule("layers.{n}.mlp_norm.weight", "blk.{n}.ffn_norm.weight"),
        Rule("layers.{n}.mlp.Wi.weight", "blk.{n}.ffn_up.weight"),
        Rule("layers.{n}.mlp.Wo.weight", "blk.{n}.ffn_down.weight"),
        Rule("final_norm.weight", "output_norm.weight"),
    ),
    roots=("model.",),
    drop=("head.**", "decoder.**"),
    spellings={"rope_theta": "global_rope_theta", "rope_local_base_freq": "local_rope_theta"},
    defaults={
        "norm_eps": DEFAULT_EPS,
        "rope_theta": GLOBAL_BASE,
        "hidden_activation": "gelu",
        "local_attention": 128,
    },
    check=_CHECK,
)
RANKING = replace(
    CONVERSION,
    serves=("ModernBertForSequenceClassification",),
    keys=(
        *CONVERSION.keys,
        Key(POOLING, lambda c: MEAN if c.get("classifier_pooling") == "mean" else CLS),
    ),
    rules=(
        *CONVERSION.rules,
        Rule("head.dense.weight", "cls.weight"),
        Rule("head.norm.weight", "cls.norm.weight"),
        Rule("classifier.*", "cls.output.*"),
    ),
    drop=(),
    check=checks.all_of(
        _CHECK, checks.only_values(classifier_activation="gelu"), encoders.check_one_score
    ),
)

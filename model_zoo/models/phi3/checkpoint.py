"""Phi-3: conversion of text model checkpoints to GGUF."""

import math

import torch
from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Computed, Conversion, Key, Rule

# The names that the family's settings use for its only kind of scaling.
_LONGROPE = ("longrope", "su", "yarn")


def _is_long(config: Configuration) -> bool:
    return config.rope()["rope_type"] in _LONGROPE


def _original_context(config: Configuration) -> int | None:
    return config.require_size("original_max_position_embeddings") if _is_long(config) else None


def _attention_factor(config: Configuration) -> float | None:
    """The factor of cosines and sines in Ding et al., "LongRoPE"."""
    if not _is_long(config):
        return None
    stated = config.rope().get("attention_factor")
    if stated is not None:
        return float(stated)
    original = config.require_size("original_max_position_embeddings")
    growth = config.require_size("max_position_embeddings") / original
    return math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0


def _factors(name: str) -> Computed:
    def make(config: Configuration) -> Tensor | None:
        if not _is_long(config):
            return None
        factors = torch.tensor(config.rope().get(f"{name}_factor") or (), dtype=torch.float32)
        if len(factors) != decoders.rotated_size(config) // 2:
            raise config.error(f"has {len(factors)} numbers as `{name}_factor`")
        return factors

    return Computed(f"rope_factors_{name}.weight", make)


CONVERSION = Conversion(
    serves=("Phi3ForCausalLM",),
    model_types=("phi3",),
    architecture="phi3",
    keys=(
        *decoders.KEYS,
        Key("attention.sliding_window", "sliding_window", optional=True),
        Key("rope.scaling.original_context_length", _original_context, optional=True),
        Key("rope.scaling.attn_factor", _attention_factor, optional=True),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        Rule("layers.{n}.self_attn.qkv_proj.weight", "blk.{n}.attn_qkv.weight"),
        Rule("layers.{n}.self_attn.o_proj.weight", "blk.{n}.attn_output.weight"),
        Rule("layers.{n}.mlp.gate_up_proj.weight", "blk.{n}.ffn_up.weight"),
        Rule("layers.{n}.mlp.down_proj.weight", "blk.{n}.ffn_down.weight"),
        *decoders.PRE_NORMS,
    ),
    computed=(_factors("long"), _factors("short")),
    drop=decoders.BUFFERS,
    nested={
        "phi3": {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        }
    },
    check=checks.only_scalings(*_LONGROPE),
)

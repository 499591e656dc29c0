"""Jamba: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, decoders, selective_scans
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule

_FEED_FORWARD = "layers.{n}.feed_forward"


def _attends(config: Configuration, layer: int) -> bool:
    period, offset = config.require_size("attn_layer_period"), config.require("attn_layer_offset")
    return bool(layer % period == offset)


def _recurs(config: Configuration, layer: int) -> bool:
    return not _attends(config, layer)


def _has_experts(config: Configuration, layer: int) -> bool:
    period = config.require_size("expert_layer_period")
    placed = layer % period == config.require("expert_layer_offset")
    return bool(placed) and config.require_size("num_experts") > 1


def _is_dense(config: Configuration, layer: int) -> bool:
    return not _has_experts(config, layer)


def _kv_heads(config: Configuration) -> list[int]:
    """The number of key heads of each layer, 0 for recurrent layers."""
    heads = config.get("num_key_value_heads") or config.require_size("num_attention_heads")
    return [heads if _attends(config, layer) else 0 for layer in range(config.layers)]


def _experts() -> tuple[Rule, ...]:
    """Rules for experts, whose router has a name of its own."""
    router, *others = decoders.experts("feed_forward", only=_has_experts)
    return replace(router, source=f"{_FEED_FORWARD}.router.weight"), *others


CONVERSION = Conversion(
    serves=("JambaForCausalLM",),
    architecture="jamba",
    keys=(
        *(key for key in decoders.SIZES if key.name != "attention.head_count_kv"),
        Key("attention.head_count_kv", _kv_heads),
        *decoders.EXPERT_COUNTS,
        *selective_scans.keys(
            expansion="mamba_expand",
            state="mamba_d_state",
            taps="mamba_d_conv",
            rank="mamba_dt_rank",
        ),
    ),
    rules=(
        decoders.EMBEDDINGS[0],
        Rule("final_layernorm.weight", "output_norm.weight"),
        decoders.EMBEDDINGS[2],
        *decoders.attention(only=_attends),
        *selective_scans.rules("mamba", only=_recurs),
        *(
            Rule(
                f"layers.{{n}}.mamba.{name}_layernorm.weight",
                f"blk.{{n}}.ssm_{name}_norm.weight",
                only=_recurs,
            )
            for name in ("dt", "b", "c")
        ),
        *decoders.feed_forward("feed_forward", only=_is_dense),
        *_experts(),
        decoders.PRE_NORMS[0],
        Rule("layers.{n}.pre_ff_layernorm.weight", "blk.{n}.ffn_norm.weight"),
    ),
    defaults={"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
    check=checks.only_values(hidden_act="silu"),
)

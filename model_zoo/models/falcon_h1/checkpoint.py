"""Falcon H1: conversion of text model checkpoints to GGUF."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from model_zoo.convert import checks, decoders, state_spaces
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import OUTPUT, Conversion, Rule, Transform
from runtime.errors import UnsupportedModelError


def _multiplier(config: Configuration, setting: str) -> float:
    return float(config.get(setting, 1.0))


def _multipliers(config: Configuration, setting: str, count: int) -> Sequence[float]:
    stated = config.get(setting) or [1.0] * count
    if not isinstance(stated, list) or len(stated) != count:
        raise config.error(f"has no {count} numbers as `{setting}`")
    return [float(number) for number in stated]


def _times(*settings: str) -> Transform:
    """Multiplies by the numbers of these settings."""

    def transform(config: Configuration, tensor: Tensor) -> Tensor:
        return tensor.float() * prod(_multiplier(config, setting) for setting in settings)

    return transform


def _times_of_feed_forward(index: int) -> Transform:
    def transform(config: Configuration, tensor: Tensor) -> Tensor:
        return tensor.float() * _multipliers(config, "mlp_multipliers", 2)[index]

    return transform


def _inputs(config: Configuration, rows: Tensor) -> Tensor:
    """Multiplies the rows of gates, values, keys, queries and steps, each by their number, and a
    matrix also by that of its input."""
    values = config.require_size("mamba_d_ssm")
    keys = config.require_size("mamba_n_groups") * config.require_size("mamba_d_state")
    sizes = values, values, keys, keys, config.require_size("mamba_n_heads")
    numbers = _multipliers(config, "ssm_multipliers", len(sizes))
    parts = rows.float().split(sizes)
    scaled = torch.cat([part * number for part, number in zip(parts, numbers, strict=True)])
    return scaled * _multiplier(config, "ssm_in_multiplier") if rows.dim() > 1 else scaled


def _expressible(config: Configuration) -> None:
    """Refuses norms before the gate, and tied heads with a multiplier of their own."""
    if config.get("mamba_rms_norm") and config.get("mamba_norm_before_gate", True):
        raise UnsupportedModelError(
            f"{config.path}: has a norm before the gate (`mamba_norm_before_gate`), which files of "
            "this architecture cannot express."
        )
    names = "embedding_multiplier", "lm_head_multiplier"
    if config.tied and len({_multiplier(config, name) for name in names}) > 1:
        raise UnsupportedModelError(
            f"{config.path}: embedding and head are the same matrix with different multipliers, "
            "which files of this architecture cannot express."
        )


CONVERSION = Conversion(
    serves=("FalconH1ForCausalLM",),
    model_types=("falcon_h1",),
    architecture="falcon-h1",
    keys=(
        *decoders.KEYS,
        *state_spaces.keys(
            heads="mamba_n_heads",
            head_dim="mamba_d_head",
            groups="mamba_n_groups",
            state="mamba_d_state",
            taps="mamba_d_conv",
        ),
    ),
    rules=(
        Rule("embed_tokens.weight", "token_embd.weight", _times("embedding_multiplier")),
        Rule("final_layernorm.weight", "output_norm.weight"),
        Rule("lm_head.weight", OUTPUT, _times("lm_head_multiplier")),
        Rule("layers.{n}.input_layernorm.weight", "blk.{n}.attn_norm.weight"),
        # Readers expect this name.
        Rule("layers.{n}.pre_ff_layernorm.weight", "blk.{n}.ffn_norm"),
        *(
            Rule(
                f"layers.{{n}}.self_attn.{name}_proj.weight",
                f"blk.{{n}}.attn_{target}.weight",
                _times(*settings),
            )
            for name, target, settings in (
                ("q", "q", ("attention_in_multiplier",)),
                ("k", "k", ("attention_in_multiplier", "key_multiplier")),
                ("v", "v", ("attention_in_multiplier",)),
                ("o", "output", ("attention_out_multiplier",)),
            )
        ),
        *state_spaces.rules(
            "mamba", groups="mamba_n_groups", inputs=_inputs, outputs=_times("ssm_out_multiplier")
        ),
        *(
            Rule(
                f"layers.{{n}}.feed_forward.{name}_proj.weight",
                f"blk.{{n}}.ffn_{name}.weight",
                transform,
            )
            for name, transform in (
                ("gate", _times_of_feed_forward(0)),
                ("up", None),
                ("down", _times_of_feed_forward(1)),
            )
        ),
    ),
    drop=("layers.{n}.mamba.mup_vector",),
    check=checks.all_of(checks.only_scalings(), _expressible, state_spaces.unlimited_steps),
)

"""Llama-Nemotron and DeciLM: conversion of text model checkpoints to GGUF."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule
from runtime.errors import UnsupportedModelError

_REPLACED = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")


def _parts(config: Configuration, part: str) -> list[Mapping[str, Any]] | None:
    """The settings of each layer's `attention` or `ffn`; None if all layers are alike."""
    blocks = config.get("block_configs")
    if blocks is None:
        return None
    if len(blocks) != config.layers:
        raise config.error(f"states {config.layers} layers, and the parts of {len(blocks)}")
    return [block[part] for block in blocks]


def _heads(config: Configuration) -> list[int]:
    """0 for layers without attention."""
    parts, heads = _parts(config, "attention"), config.require_size("num_attention_heads")
    if parts is None:
        return [heads] * config.layers
    return [
        heads if part["n_heads_in_group"] or part.get("replace_with_linear") else 0
        for part in parts
    ]


def _kv_heads(config: Configuration) -> list[int]:
    """0 also for layers with a matrix instead of attention."""
    parts, heads = _parts(config, "attention"), config.require_size("num_attention_heads")
    if parts is None:
        listed = config.get("num_key_value_heads_per_layer")
        return list(listed or [config.require_size("num_key_value_heads")] * config.layers)
    groups = [part["n_heads_in_group"] for part in parts]
    return [0 if group is None else heads // int(group) for group in groups]


def _widths(config: Configuration) -> list[int]:
    """Two thirds of a multiple of the hidden size, rounded up to a multiple of 256; 0 for layers
    without a feed-forward."""
    parts, hidden = _parts(config, "ffn"), config.require_size("hidden_size")
    if parts is None:
        return [config.require_size("intermediate_size")] * config.layers
    exact = [int(2 * (part["ffn_mult"] or 0) * hidden / 3) for part in parts]
    return [width + -width % 256 for width in exact]


def _attends(config: Configuration, layer: int) -> bool:
    return _kv_heads(config)[layer] > 0


def _projects(config: Configuration, layer: int) -> bool:
    return _has_heads(config, layer) and not _attends(config, layer)


def _has_heads(config: Configuration, layer: int) -> bool:
    return _heads(config)[layer] > 0


def _feeds_forward(config: Configuration, layer: int) -> bool:
    return _widths(config)[layer] > 0


def _interleaved(config: Configuration, rows: Tensor) -> Tensor:
    """As `transforms.interleaved`, for any number of heads."""
    halves = rows.unflatten(0, (-1, 2, config.head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)


def _only_usual_parts(config: Configuration) -> None:
    """Refuses windows, and matrices instead of feed-forwards."""
    windows = [part.get("window_length") for part in _parts(config, "attention") or ()]
    matrices = [part.get("replace_with_linear") for part in _parts(config, "ffn") or ()]
    if any(windows) or any(matrices):
        raise UnsupportedModelError(
            f"{config.path}: `block_configs` has layers with a window or with a matrix instead of "
            "the feed-forward, which files of this architecture cannot express."
        )


CONVERSION = Conversion(
    serves=("DeciLMForCausalLM",),
    architecture="deci",
    keys=(
        *(key for key in decoders.KEYS if key.name not in _REPLACED),
        Key("attention.head_count", _heads),
        Key("attention.head_count_kv", _kv_heads),
        Key("feed_forward_length", _widths),
        *decoders.LINEAR_SCALING,
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *(
            replace(rule, transform=_interleaved if rule.transform else None)
            for rule in decoders.attention(rotated=True, only=_attends)
        ),
        Rule("layers.{n}.self_attn.linear_attn.*", "blk.{n}.attn_output.*", only=_projects),
        *decoders.feed_forward(only=_feeds_forward),
        replace(decoders.PRE_NORMS[0], only=_has_heads),
        replace(decoders.PRE_NORMS[1], only=_feeds_forward),
    ),
    computed=(decoders.LLAMA3_FACTORS,),
    check=checks.all_of(
        checks.only_scalings("linear", "llama3", "dynamic"),  # dynamic: of texts beyond the context
        checks.only_values(hidden_act="silu"),
        _only_usual_parts,
    ),
)

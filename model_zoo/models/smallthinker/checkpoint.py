"""SmallThinker: conversion of text model checkpoints to GGUF."""

from gguf import ExpertGatingFuncType

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule
from model_zoo.models.smallthinker.text import FULL_EVERY
from runtime.errors import UnsupportedModelError


def _gating(config: Configuration) -> int:
    softmax = config.get("moe_primary_router_apply_softmax")
    kind = ExpertGatingFuncType.SOFTMAX if softmax else ExpertGatingFuncType.SIGMOID
    return int(kind.value)


def _has_windows(config: Configuration) -> bool:
    return any(config.get("sliding_window_layout") or ())


def _window(config: Configuration) -> int | None:
    return config.require_size("sliding_window_size") if _has_windows(config) else None


def _known_layouts(config: Configuration) -> None:
    """Refuses layers other than those that readers assume."""
    layers, windows = range(config.layers), config.get("sliding_window_layout")
    expected = [int(n % FULL_EVERY > 0) for n in layers] if _has_windows(config) else None
    rotated = config.get("rope_layout") or [1 for _ in layers]
    if (expected is not None and windows != expected) or rotated != (expected or [1] * len(layers)):
        raise UnsupportedModelError(
            f"{config.path}: has `sliding_window_layout` and `rope_layout` that files of this "
            "architecture cannot express."
        )


CONVERSION = Conversion(
    serves=("SmallThinkerForCausalLM", "SmallthinkerForCausalLM"),
    architecture="smallthinker",
    keys=(
        *(key for key in decoders.KEYS if key.name != "feed_forward_length"),
        Key("feed_forward_length", "moe_ffn_hidden_size"),
        Key("expert_feed_forward_length", "moe_ffn_hidden_size"),
        Key("expert_count", "moe_num_primary_experts"),
        Key("expert_used_count", "moe_num_active_primary_experts"),
        Key("expert_gating_func", _gating),
        Key("attention.sliding_window", _window),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        Rule("layers.{n}.block_sparse_moe.primary_router.weight", "blk.{n}.ffn_gate_inp.weight"),
        *decoders.experts("block_sparse_moe", names=("gate", "up", "down"))[1:],
        *decoders.PRE_NORMS,
    ),
    check=checks.all_of(checks.only_scalings(), _known_layouts),
)

"""Laguna: conversion of text model checkpoints to GGUF."""

from gguf import ExpertGatingFuncType

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.models.laguna.text import FULL_EVERY, NEAR_BASE, NEAR_SIZE
from runtime.errors import UnsupportedModelError

NEAR = "sliding_attention"


def _heads(config: Configuration) -> list[int]:
    stated = config.get("num_attention_heads_per_layer")
    heads = stated or [config.require_size("num_attention_heads")] * config.layers
    if len(heads) != config.layers:
        raise config.error(f"has {config.layers} layers, but states the heads of {len(heads)}")
    return [int(count) for count in heads]


def _slides(config: Configuration) -> list[bool]:
    kinds = config.layer_types() or ()
    return [kind == NEAR for kind in kinds] or [False] * config.layers


def _window(config: Configuration) -> int | None:
    return config.require_size("sliding_window") if any(_slides(config)) else None


def _unusual(config: Configuration) -> list[bool] | None:
    """Which layers have a window; None if readers assume the same."""
    slides = _slides(config)
    usual = [layer % FULL_EVERY != 0 for layer in range(config.layers)]
    return None if slides == usual or not any(slides) else slides


def _near_size(config: Configuration) -> int | None:
    part = float(config.rope(NEAR).get("partial_rotary_factor", 1.0))
    return int(config.head_dim * part) if any(_slides(config)) else None


def _plain_windows(config: Configuration) -> None:
    kind = config.rope(NEAR)["rope_type"]
    if any(_slides(config)) and kind != "default":
        raise UnsupportedModelError(
            f"{config.path}: layers with a window have the rope scaling {kind}; in files of this "
            "architecture they have none."
        )


def _of_experts(source: str, target: str) -> Rule:
    return Rule(f"layers.{{n}}.mlp.{source}", f"blk.{{n}}.{target}", only=decoders.follows)


CONVERSION = Conversion(
    serves=("LagunaForCausalLM",),
    model_types=("laguna",),
    architecture={LLAMA_CPP: "laguna"},
    keys=(
        *(key for key in decoders.KEYS if key.name != "attention.head_count"),
        Key("attention.head_count", _heads),
        *decoders.YARN_SCALING,
        Key("attention.sliding_window", _window),
        Key("attention.sliding_window_pattern", _unusual),
        Key(NEAR_BASE, lambda c: decoders.rope_base(c, NEAR) if any(_slides(c)) else None),
        Key(NEAR_SIZE, _near_size),
        Key("leading_dense_block_count", decoders.leading_dense),
        *decoders.EXPERT_COUNTS,
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        Key("expert_weights_scale", "moe_routed_scaling_factor", of=float),
        Key("expert_weights_norm", lambda c: True),
        Key("expert_gating_func", lambda c: ExpertGatingFuncType.SIGMOID.value),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        Rule("layers.{n}.self_attn.g_proj.weight", "blk.{n}.attn_gate.weight"),
        *decoders.HEAD_NORMS,
        *decoders.feed_forward(only=decoders.is_leading),
        *decoders.experts(only=decoders.follows),
        _of_experts("experts.e_score_correction_bias", "exp_probs_b.bias"),
        *decoders.shared_experts("mlp.shared_expert", only=decoders.follows),
        *decoders.PRE_NORMS,
    ),
    defaults={"moe_routed_scaling_factor": 1.0},
    check=checks.all_of(
        checks.only_scalings("yarn"),
        checks.only_values(
            moe_apply_router_weight_on_input=False, moe_router_logit_softcapping=0.0
        ),
        _plain_windows,
    ),
)

"""Hunyuan V1, HunyuanOCR, Hunyuan-VL and Maincoder: conversion of text model checkpoints to
GGUF."""

from dataclasses import replace
from typing import Any

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule
from model_zoo.models.hunyuan.text import MAINCODER, SECTIONS, SHARED, STRETCH
from runtime.errors import UnsupportedModelError

# Of all models with a stretched base, whatever their settings state, as llama.cpp's converter.
_STRETCHED_CONTEXT = 1 << 18
_STRETCHED = ("dynamic", "xdrope")


def _stretch(config: Configuration) -> float | None:
    """The parameter alpha of a stretched base; None if the base is not stretched."""
    rope = config.rope()
    return float(rope["alpha"]) if rope["rope_type"] in _STRETCHED and rope.get("alpha") else None


def _base(config: Configuration) -> float:
    """NTK-aware scaling with a fixed alpha: base * alpha^(dim / (dim - 2))."""
    alpha, dim = _stretch(config), config.head_dim
    return decoders.rope_base(config) * (1.0 if alpha is None else alpha ** (dim / (dim - 2)))


def _context(config: Configuration) -> int:
    stretched = _stretch(config) is not None
    return _STRETCHED_CONTEXT if stretched else config.require_size("max_position_embeddings")


def _sections(config: Configuration) -> list[int]:
    """The number of frequencies for token, column, row and image."""
    rope = config.rope()
    return list(map(int, rope.get("mrope_section") or rope.get("xdrope_section") or SECTIONS))


def _four_sections(config: Configuration) -> None:
    sections = config.derived("rope.dimension_sections", _sections)
    count = config.head_dim // 2
    if len(sections) != len(SECTIONS) or sum(sections) != count:
        raise UnsupportedModelError(
            f"{config.path}: rotates by the sections {sections[:8]}; {len(SECTIONS)} that make up "
            f"{count} frequencies are supported."
        )


def _of_every_layer(config: Configuration, key: str) -> Any:
    """A setting that is stated once or, with equal values, for each layer."""
    stated = config.require(key)
    if not isinstance(stated, list):
        return stated
    if any(value != stated[0] for value in stated):
        raise config.error(f"has layers with different values of `{key}`")
    return stated[0]


def _expert_width(config: Configuration) -> Any:
    own = config.get("moe_intermediate_size") is not None
    return _of_every_layer(config, "moe_intermediate_size" if own else "intermediate_size")


def _stated_alpha(config: Configuration) -> None:
    alpha = config.derived("rope.freq_base", _stretch)
    kind = config.rope()["rope_type"]
    if kind in _STRETCHED and alpha is None:
        raise UnsupportedModelError(
            f"{config.path}: the rope scaling {kind} needs an `alpha`, without which it depends "
            "on the length of each sequence."
        )


def _one_shared_expert(config: Configuration) -> None:
    key = "num_shared_expert"
    count = config.derived(key, lambda c: _of_every_layer(c, key))
    if count != 1:
        raise UnsupportedModelError(
            f"{config.path}: has {count} shared experts in a layer (`{key}`); 1 is supported."
        )


_CHECKS = (
    _stated_alpha,
    checks.only_values(use_qk_norm=True, use_cla=False, norm_topk_prob=True),
)
_RULES = (
    *decoders.EMBEDDINGS,
    *decoders.attention(),
    *decoders.PRE_NORMS,
    Rule("layers.{n}.self_attn.query_layernorm.weight", "blk.{n}.attn_q_norm.weight"),
    Rule("layers.{n}.self_attn.key_layernorm.weight", "blk.{n}.attn_k_norm.weight"),
)

CONVERSION = Conversion(
    serves=("HunYuanDenseV1ForCausalLM",),
    model_types=("hunyuan_v1_dense",),
    architecture="hunyuan-dense",
    keys=(
        *(key for key in decoders.SIZES if key.name != "context_length"),
        Key("context_length", _context),
        *decoders.HEAD_SIZES,
        decoders.ROTATED_SIZE,
        Key("rope.freq_base", _base),
    ),
    rules=(*_RULES, *decoders.feed_forward()),
    defaults={"num_shared_expert": 1},
    spellings={"head_dim": "attention_head_dim"},
    check=checks.all_of(checks.only_scalings("dynamic"), *_CHECKS),
)

WITH_EXPERTS = replace(
    CONVERSION,
    serves=("HunYuanMoEV1ForCausalLM",),
    model_types=("hunyuan_v1_moe",),
    architecture="hunyuan-moe",
    keys=(
        *CONVERSION.keys,
        Key("expert_count", "num_experts"),
        Key("expert_used_count", lambda c: _of_every_layer(c, "moe_topk")),
        Key("expert_feed_forward_length", _expert_width),
        Key("expert_shared_count", lambda c: _of_every_layer(c, "num_shared_expert")),
        Key(SHARED, "intermediate_size"),
    ),
    rules=(
        *_RULES,
        Rule("layers.{n}.mlp.gate.wg.weight", "blk.{n}.ffn_gate_inp.weight"),
        *decoders.experts()[1:],
        *(
            Rule(
                f"layers.{{n}}.mlp.shared_mlp.{name}_proj.weight",
                f"blk.{{n}}.ffn_{name}_shexp.weight",
            )
            for name in ("gate", "up", "down")
        ),
    ),
    check=checks.all_of(checks.only_scalings("dynamic"), *_CHECKS, _one_shared_expert),
)

WITH_VISION = replace(
    CONVERSION,
    serves=("HunYuanVLForConditionalGeneration",),
    model_types=(),
    architecture="hunyuan_vl",
    keys=(
        *decoders.SIZES,
        *decoders.HEAD_SIZES,
        decoders.ROTATED_SIZE,
        Key("rope.freq_base", decoders.rope_base),
        Key(STRETCH, _stretch),
        Key("rope.dimension_sections", _sections),
    ),
    drop=("vit.**",),
    defaults={"tie_word_embeddings": True},
    check=checks.all_of(checks.only_scalings(*_STRETCHED), *_CHECKS, _four_sections),
)

MAINCODER_1B = Conversion(
    serves=("MaincoderForCausalLM",),
    architecture=MAINCODER,
    keys=(
        *(key for key in decoders.KEYS if key.name != "feed_forward_length"),
        Key(
            "feed_forward_length",
            lambda c: c.get("intermediate_size_mlp") or c.require("intermediate_size"),
        ),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.HEAD_NORMS,
        *decoders.feed_forward("feed_forward"),
        *decoders.PRE_NORMS,
    ),
    check=checks.all_of(
        checks.only_scalings(), checks.only_values(use_qk_norm=True, hidden_act="silu")
    ),
)

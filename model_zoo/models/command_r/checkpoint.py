"""Command-R, Command-R+, Command R7B and Cohere's models with experts: conversion of text model
checkpoints to GGUF."""

from dataclasses import replace

from gguf import ExpertGatingFuncType

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.models.command_r.text import LAYER_EPS, RMS_EPS, WITH_EXPERTS


def _context(config: Configuration) -> int:
    """Settings of Command-R and Command-R+ state the trained context as `model_max_length`, and
    8,192 as the number of positions."""
    stated = config.get("model_max_length")
    return config.require_size("max_position_embeddings" if stated is None else "model_max_length")


_RULES = (
    *decoders.EMBEDDINGS,
    *decoders.attention(),
    *decoders.feed_forward(),
    Rule("layers.{n}.input_layernorm.weight", "blk.{n}.attn_norm.weight"),
)
CONVERSION = Conversion(
    serves=("CohereForCausalLM",),
    model_types=("cohere",),
    architecture="command-r",
    keys=(
        *(key for key in decoders.layer_normed() if key.name != "context_length"),
        Key("context_length", _context),
        Key("logit_scale", "logit_scale", of=float),
    ),
    rules=(*_RULES, *decoders.STATED_HEAD_NORMS),
    defaults={"tie_word_embeddings": True, "logit_scale": 0.0625, "layer_norm_eps": 1e-5},
    check=checks.only_scalings(),
)

WINDOWED = replace(
    CONVERSION,
    serves=("Cohere2ForCausalLM",),
    model_types=("cohere2",),
    architecture="cohere2",
    keys=(
        *CONVERSION.keys,
        Key("attention.sliding_window", "sliding_window"),
        Key("attention.sliding_window_pattern", decoders.unusual_windows(4)),
    ),
    rules=_RULES,
    defaults={**CONVERSION.defaults, "sliding_window": 4096},
)


def _slides(config: Configuration) -> list[bool]:
    """For each layer whether it has a window: as listed, or all but one of every
    `sliding_window_pattern` after the dense ones, which have none."""
    listed = config.layer_types()
    if listed is not None:
        return [kind == "sliding_attention" for kind in listed]
    dense, period = decoders.leading_dense(config), config.get("sliding_window_pattern", 4)
    return [n >= dense and (n - dense + 1) % period != 0 for n in range(config.layers)]


def _of_shared(config: Configuration) -> int | None:
    shared = config.get("num_shared_experts", 0)
    return shared * config.require_size("intermediate_size") if shared else None


def _has_shared(config: Configuration, layer: int) -> bool:
    return bool(config.get("num_shared_experts")) and decoders.follows(config, layer)


_REPLACED = ("context_length", "feed_forward_length", LAYER_EPS)
_LAYER_EPS = Key(
    LAYER_EPS,
    lambda c: float(c.require("layer_norm_eps")) if c.get("rms_norm_eps") is None else None,
)

EXPERTS = replace(
    CONVERSION,
    serves=("Cohere2MoeForCausalLM",),
    model_types=("cohere2_moe",),
    architecture={LLAMA_CPP: WITH_EXPERTS},
    keys=(
        *(key for key in decoders.layer_normed() if key.name not in _REPLACED),
        Key("context_length", "max_position_embeddings"),
        Key(
            "feed_forward_length",
            lambda c: c.get("prefix_dense_intermediate_size") or c.require("intermediate_size"),
        ),
        _LAYER_EPS,
        Key(RMS_EPS, "rms_norm_eps", optional=True, of=float),
        Key("logit_scale", "logit_scale", of=float),
        Key("attention.sliding_window", "sliding_window"),
        Key("attention.sliding_window_pattern", _slides),
        Key("leading_dense_block_count", decoders.leading_dense),
        *decoders.EXPERT_COUNTS,
        Key("expert_feed_forward_length", "intermediate_size"),
        Key("expert_shared_count", "num_shared_experts"),
        Key("expert_shared_feed_forward_length", _of_shared),
        Key("expert_weights_norm", "norm_topk_prob", of=bool),
        Key("expert_gating_func", lambda c: ExpertGatingFuncType.SIGMOID.value),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.feed_forward(only=decoders.is_leading),
        *decoders.experts(only=decoders.follows),
        *decoders.shared_experts(only=_has_shared),
        Rule("layers.{n}.input_layernorm.weight", "blk.{n}.attn_norm.weight"),
    ),
    # As in Cohere2MoeConfig of `transformers`.
    defaults={
        **WINDOWED.defaults,
        "expert_selection_fn": "softmax",
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
        "num_shared_experts": 0,
    },
    check=checks.all_of(
        checks.only_scalings(),
        checks.only_values(
            expert_selection_fn="sigmoid",
            prefix_dense_sliding_window_pattern=1,
            shared_expert_combination_strategy="average",
        ),
    ),
)

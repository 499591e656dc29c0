"""Qwen3-Next and Qwen 3.5: conversion of text model checkpoints to GGUF."""

import torch
from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key, Rule, Transform
from model_zoo.convert.transforms import plus_one, rates, squeezed
from model_zoo.models.qwen3next.text import SECTIONS
from runtime.errors import UnsupportedModelError


def _attends(config: Configuration, layer: int) -> bool:
    stated = config.layer_types()
    if stated is None:
        return (layer + 1) % config.require_size("full_attention_interval") == 0
    return stated[layer] == "full_attention"


def _recurs(config: Configuration, layer: int) -> bool:
    return not _attends(config, layer)


def _interval(config: Configuration) -> int:
    """The n of "every n-th layer has attention"."""
    return next((n + 1 for n in range(config.layers) if _attends(config, n)), config.layers + 1)


def _even_intervals(config: Configuration) -> None:
    interval = _interval(config)
    if any(_attends(config, n) != ((n + 1) % interval == 0) for n in range(config.layers)):
        raise UnsupportedModelError(
            f"{config.path}: `layer_types` must have `full_attention` at every n-th layer and "
            "nowhere else; this architecture's files cannot express other patterns."
        )


def _kv_heads(config: Configuration) -> list[int]:
    """The number of key heads of each layer, 0 for recurrent layers, as in Ollama's files."""
    heads = config.require_size("num_key_value_heads")
    return [heads if _attends(config, n) else 0 for n in range(config.layers)]


def _sections(config: Configuration) -> list[int]:
    """The number of frequencies for time, row and column; readers require four numbers."""
    stated = config.rope().get("mrope_section", SECTIONS)
    return [*map(int, stated), 0, 0, 0, 0][:4]


def _heads(config: Configuration) -> tuple[int, int]:
    """The number of key heads, and of value heads per key head."""
    keys = config.require_size("linear_num_key_heads")
    return keys, config.require_size("linear_num_value_heads") // keys


def _tiled(config: Configuration, rows: Tensor) -> Tensor:
    """Reorders the value heads in rows or other parts: from grouped by key head to tiled over key
    heads."""
    keys, values = _heads(config)
    return rows.unflatten(0, (keys, values, -1)).transpose(0, 1).flatten(0, 2)


def _tiled_values(config: Configuration, rows: Tensor) -> Tensor:
    """Reorders the values, which follow queries and keys, like `_tiled`."""
    keys = 2 * _heads(config)[0] * config.require_size("linear_key_head_dim")
    return torch.cat([rows[:keys], _tiled(config, rows[keys:])])


def _tiled_columns(config: Configuration, matrix: Tensor) -> Tensor:
    return _tiled(config, matrix.t()).t()


def _split(config: Configuration, rows: Tensor) -> tuple[Tensor, ...]:
    """Separates queries, keys, values and gates, which the rows group by key head."""
    keys, values = _heads(config)
    key_dim = config.require_size("linear_key_head_dim")
    value_dim = values * config.require_size("linear_value_head_dim")
    parts = rows.unflatten(0, (keys, -1)).split((key_dim, key_dim, value_dim, value_dim), dim=1)
    return tuple(part.flatten(0, 1) for part in parts)


def _inputs(config: Configuration, rows: Tensor) -> Tensor:
    return torch.cat(_split(config, rows)[:3])


def _gates(config: Configuration, rows: Tensor) -> Tensor:
    return _split(config, rows)[3]


def _after(first: Transform, second: Transform) -> Transform:
    return lambda config, tensor: second(config, first(config, tensor))


def _net(
    source: str, target: str, transform: Transform | None = None, *flavours: str, keep: bool = False
) -> Rule:
    return Rule(
        f"layers.{{n}}.linear_attn.{source}",
        f"blk.{{n}}.{target}",
        transform,
        only=_recurs,
        keep=keep,
        flavours=flavours or (LLAMA_CPP, OLLAMA),
    )


KEYS = (
    *(key for key in decoders.KEYS if key.name not in ("feed_forward_length", "vocab_size")),
    *decoders.YARN_SCALING,
    Key("feed_forward_length", "intermediate_size", optional=True),
    Key("full_attention_interval", _interval),
    Key("ssm.conv_kernel", "linear_conv_kernel_dim"),
    Key("ssm.state_size", "linear_key_head_dim"),
    Key("ssm.group_count", "linear_num_key_heads"),
    Key("ssm.time_step_rank", "linear_num_value_heads"),
    Key(
        "ssm.inner_size",
        lambda c: c.require("linear_num_value_heads") * c.require("linear_value_head_dim"),
    ),
    Key("vocab_size", "vocab_size"),
)


EXPERT_KEYS = (
    *decoders.EXPERT_COUNTS,
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
)


RULES = (
    *decoders.EMBEDDINGS_PLUS_ONE,
    Rule("layers.{n}.input_layernorm.weight", "blk.{n}.attn_norm.weight", plus_one),
    Rule(
        "layers.{n}.post_attention_layernorm.weight",
        "blk.{n}.post_attention_norm.weight",
        plus_one,
    ),
    *decoders.attention(only=_attends),
    *(
        Rule(rule.source, rule.target, rule.transform, only=_attends)
        for rule in decoders.HEAD_NORMS_PLUS_ONE
    ),
    _net("norm.weight", "ssm_norm.weight"),
)


EXPERT_RULES = (
    *decoders.experts(),
    *decoders.stacked_experts(),
    *decoders.GATED_SHARED_EXPERT,
)


DROPPED = (*decoders.OTHER_PARTS, "merger.**", "mtp.**")


DEFAULTS = {"partial_rotary_factor": 0.25, "full_attention_interval": 4}


CONVERSION = Conversion(
    serves=("Qwen3NextForCausalLM",),
    architecture={LLAMA_CPP: "qwen3next"},
    keys=(
        *KEYS,
        *EXPERT_KEYS,
        Key("expert_weights_norm", "norm_topk_prob", of=bool),
    ),
    rules=(
        *RULES,
        *EXPERT_RULES,
        _net("in_proj_qkvz.weight", "attn_qkv.weight", _inputs),
        _net("in_proj_qkvz.weight", "attn_gate.weight", _gates),
        _net("in_proj_ba.weight", "ssm_ba.weight"),
        _net("conv1d.weight", "ssm_conv1d.weight", squeezed, keep=True),
        _net("A_log", "ssm_a", rates),
        _net("dt_bias", "ssm_dt.bias"),
        _net("out_proj.weight", "ssm_out.weight"),
    ),
    drop=DROPPED,
    defaults={**DEFAULTS, "norm_topk_prob": True},
    check=checks.all_of(checks.only_scalings("yarn"), _even_intervals, checks.experts_everywhere),
)


QWEN35_KEYS = (
    *(key for key in KEYS if key.name != "attention.head_count_kv"),
    Key("attention.head_count_kv", "num_key_value_heads", flavours=(LLAMA_CPP,)),
    Key("attention.head_count_kv", _kv_heads, flavours=(OLLAMA,)),
    Key("rope.dimension_sections", _sections),
    Key("rope.mrope_interleaved", lambda c: True, flavours=(OLLAMA,)),
    Key("ssm.v_head_reordered", lambda c: True, flavours=(OLLAMA,)),
)


QWEN35_RULES = (
    *RULES,
    _net("in_proj_qkv.weight", "attn_qkv.weight", _tiled_values),
    _net("in_proj_z.weight", "attn_gate.weight", _tiled),
    _net("in_proj_b.weight", "ssm_beta.weight", _tiled),
    _net("in_proj_a.weight", "ssm_alpha.weight", _tiled),
    _net("conv1d.weight", "ssm_conv1d.weight", _after(squeezed, _tiled_values), keep=True),
    _net("A_log", "ssm_a", _after(rates, _tiled)),
    _net("dt_bias", "ssm_dt.bias", _tiled, LLAMA_CPP),
    _net("dt_bias", "ssm_dt", _tiled, OLLAMA),
    _net("out_proj.weight", "ssm_out.weight", _tiled_columns),
)


QWEN35 = Conversion(
    serves=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    model_types=("qwen3_5_text",),
    architecture="qwen35",
    keys=QWEN35_KEYS,
    rules=(*QWEN35_RULES, *decoders.feed_forward()),
    drop=DROPPED,
    defaults=DEFAULTS,
    check=checks.all_of(checks.only_scalings("yarn"), _even_intervals),
)


QWEN35_MOE = Conversion(
    serves=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    architecture="qwen35moe",
    keys=(*QWEN35_KEYS, *EXPERT_KEYS),
    rules=(*QWEN35_RULES, *EXPERT_RULES),
    drop=DROPPED,
    defaults=DEFAULTS,
    check=checks.all_of(checks.only_scalings("yarn"), _even_intervals),
)

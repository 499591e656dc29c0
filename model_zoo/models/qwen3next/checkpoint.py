"""Qwen3-Next and Qwen 3.5: conversion of text model checkpoints to GGUF."""

import torch
from torch import Tensor

from model_zoo.convert import checks, decoders, delta_nets
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.delta_nets import net
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key, Rule
from model_zoo.convert.transforms import plus_one, rates, squeezed
from model_zoo.models.qwen3next.text import SECTIONS


def _kv_heads(config: Configuration) -> list[int]:
    """The number of key heads of each layer, 0 for recurrent layers, as in Ollama's files."""
    heads = config.require_size("num_key_value_heads")
    return [heads if delta_nets.attends(config, n) else 0 for n in range(config.layers)]


def _split(config: Configuration, rows: Tensor) -> tuple[Tensor, ...]:
    """Separates queries, keys, values and gates, which the rows group by key head."""
    keys, values = delta_nets.heads(config)
    key_dim = config.require_size("linear_key_head_dim")
    value_dim = values * config.require_size("linear_value_head_dim")
    parts = rows.unflatten(0, (keys, -1)).split((key_dim, key_dim, value_dim, value_dim), dim=1)
    return tuple(part.flatten(0, 1) for part in parts)


def _inputs(config: Configuration, rows: Tensor) -> Tensor:
    return torch.cat(_split(config, rows)[:3])


def _gates(config: Configuration, rows: Tensor) -> Tensor:
    return _split(config, rows)[3]


RULES = (
    *decoders.EMBEDDINGS_PLUS_ONE,
    Rule("layers.{n}.input_layernorm.weight", "blk.{n}.attn_norm.weight", plus_one),
    Rule(
        "layers.{n}.post_attention_layernorm.weight",
        "blk.{n}.post_attention_norm.weight",
        plus_one,
    ),
    *delta_nets.ATTENTION,
)


DEFAULTS = {"partial_rotary_factor": 0.25, "full_attention_interval": 4}


CONVERSION = Conversion(
    serves=("Qwen3NextForCausalLM",),
    architecture={LLAMA_CPP: "qwen3next"},
    keys=(
        *delta_nets.KEYS,
        *delta_nets.EXPERT_KEYS,
        Key("expert_weights_norm", "norm_topk_prob", of=bool),
    ),
    rules=(
        *RULES,
        *delta_nets.EXPERT_RULES,
        net("norm.weight", "ssm_norm.weight"),
        net("in_proj_qkvz.weight", "attn_qkv.weight", _inputs),
        net("in_proj_qkvz.weight", "attn_gate.weight", _gates),
        net("in_proj_ba.weight", "ssm_ba.weight"),
        net("conv1d.weight", "ssm_conv1d.weight", squeezed, keep=True),
        net("A_log", "ssm_a", rates),
        net("dt_bias", "ssm_dt.bias"),
        net("out_proj.weight", "ssm_out.weight"),
    ),
    drop=delta_nets.DROPPED,
    defaults={**DEFAULTS, "norm_topk_prob": True},
    check=checks.all_of(
        checks.only_scalings("yarn"), delta_nets.even_intervals, checks.experts_everywhere
    ),
)


QWEN35_KEYS = (
    *(key for key in delta_nets.KEYS if key.name != "attention.head_count_kv"),
    Key("attention.head_count_kv", "num_key_value_heads", flavours=(LLAMA_CPP,)),
    Key("attention.head_count_kv", _kv_heads, flavours=(OLLAMA,)),
    delta_nets.sections_key(SECTIONS),
    Key("rope.mrope_interleaved", lambda c: True, flavours=(OLLAMA,)),
    Key("ssm.v_head_reordered", lambda c: True, flavours=(OLLAMA,)),
)


QWEN35 = Conversion(
    serves=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    model_types=("qwen3_5_text",),
    architecture="qwen35",
    keys=QWEN35_KEYS,
    rules=(*RULES, *delta_nets.TILED_RULES, *decoders.feed_forward()),
    drop=delta_nets.DROPPED,
    defaults=DEFAULTS,
    check=checks.all_of(checks.only_scalings("yarn"), delta_nets.even_intervals),
)


QWEN35_MOE = Conversion(
    serves=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    architecture="qwen35moe",
    keys=(*QWEN35_KEYS, *delta_nets.EXPERT_KEYS),
    rules=(*RULES, *delta_nets.TILED_RULES, *delta_nets.EXPERT_RULES),
    drop=delta_nets.DROPPED,
    defaults=DEFAULTS,
    check=checks.all_of(checks.only_scalings("yarn"), delta_nets.even_intervals),
)

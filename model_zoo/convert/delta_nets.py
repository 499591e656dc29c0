"""Conversion of gated delta nets between layers with attention, as in the Qwen models."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model_zoo.convert import decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Key, Rule, Transform
from model_zoo.convert.transforms import rates, squeezed
from runtime.errors import UnsupportedModelError


def attends(config: Configuration, layer: int) -> bool:
    stated = config.layer_types()
    if stated is None:
        return (layer + 1) % config.require_size("full_attention_interval") == 0
    return stated[layer] != "linear_attention"


def recurs(config: Configuration, layer: int) -> bool:
    return not attends(config, layer)


def _interval(config: Configuration) -> int:
    """The n of "every n-th layer has attention"."""
    return next((n + 1 for n in range(config.layers) if attends(config, n)), config.layers + 1)


def even_intervals(config: Configuration) -> None:
    interval = _interval(config)
    if any(attends(config, n) != ((n + 1) % interval == 0) for n in range(config.layers)):
        raise UnsupportedModelError(
            f"{config.path}: `layer_types` must have attention at every n-th layer and nowhere "
            "else; this architecture's files cannot express other patterns."
        )


def heads(config: Configuration) -> tuple[int, int]:
    """The number of key heads, and of value heads per key head."""
    keys = config.require_size("linear_num_key_heads")
    return keys, config.require_size("linear_num_value_heads") // keys


def _tiled(config: Configuration, rows: Tensor) -> Tensor:
    """Reorders the value heads in rows or other parts: from grouped by key head to tiled over key
    heads."""
    keys, values = heads(config)
    return rows.unflatten(0, (keys, values, -1)).transpose(0, 1).flatten(0, 2)


def _tiled_values(config: Configuration, rows: Tensor) -> Tensor:
    """Reorders the values, which follow queries and keys, like `_tiled`."""
    keys = 2 * heads(config)[0] * config.require_size("linear_key_head_dim")
    return torch.cat([rows[:keys], _tiled(config, rows[keys:])])


def _tiled_columns(config: Configuration, matrix: Tensor) -> Tensor:
    return _tiled(config, matrix.t()).t()


def _after(first: Transform, second: Transform) -> Transform:
    return lambda config, tensor: second(config, first(config, tensor))


def net(
    source: str, target: str, transform: Transform | None = None, *flavours: str, keep: bool = False
) -> Rule:
    return Rule(
        f"layers.{{n}}.linear_attn.{source}",
        f"blk.{{n}}.{target}",
        transform,
        only=recurs,
        keep=keep,
        flavours=flavours or (LLAMA_CPP, OLLAMA),
    )


def sections_key(default: Sequence[int]) -> Key:
    """The number of frequencies for time, row and column; readers require four numbers."""

    def sections(config: Configuration) -> list[int]:
        stated = config.rope().get("mrope_section", default)
        return [*map(int, stated), 0, 0, 0, 0][:4]

    return Key("rope.dimension_sections", sections)


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
EXPERT_RULES = (
    *decoders.experts(),
    *decoders.stacked_experts(),
    *decoders.GATED_SHARED_EXPERT,
)
ATTENTION = (
    *decoders.attention(only=attends),
    *(
        Rule(rule.source, rule.target, rule.transform, only=attends)
        for rule in decoders.HEAD_NORMS_PLUS_ONE
    ),
)
# With value heads tiled over key heads.
TILED_RULES = (
    net("norm.weight", "ssm_norm.weight"),
    net("in_proj_qkv.weight", "attn_qkv.weight", _tiled_values),
    net("in_proj_z.weight", "attn_gate.weight", _tiled),
    net("in_proj_b.weight", "ssm_beta.weight", _tiled),
    net("in_proj_a.weight", "ssm_alpha.weight", _tiled),
    net("conv1d.weight", "ssm_conv1d.weight", _after(squeezed, _tiled_values), keep=True),
    net("A_log", "ssm_a", _after(rates, _tiled)),
    net("dt_bias", "ssm_dt.bias", _tiled, LLAMA_CPP),
    net("dt_bias", "ssm_dt", _tiled, OLLAMA),
    net("out_proj.weight", "ssm_out.weight", _tiled_columns),
)
DROPPED = (*decoders.OTHER_PARTS, "merger.**", "mtp.**")

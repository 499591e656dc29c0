"""Parts of conversion tables of models with Mamba 2 layers."""

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from torch import Tensor

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Key, Rule, Transform
from model_zoo.convert.transforms import rates, squeezed
from runtime.errors import UnsupportedModelError


def keys(*, heads: str, head_dim: str, groups: str, state: str, taps: str) -> tuple[Key, ...]:
    """Keys of the sizes; the arguments are the names of settings."""
    return (
        Key("ssm.conv_kernel", taps),
        Key("ssm.state_size", state),
        Key("ssm.group_count", groups),
        Key("ssm.time_step_rank", heads),
        Key("ssm.inner_size", lambda c: c.require_size(heads) * c.require_size(head_dim)),
    )


def rules(
    module: str,
    *,
    groups: str,
    only: Callable[[Configuration, int], bool] | None = None,
    inputs: Transform | None = None,
    outputs: Transform | None = None,
) -> tuple[Rule, ...]:
    """Rules for a layer's part `module`. groups: the setting with the number of groups, of which
    each has a row of the norm. inputs, outputs: transforms of the two projections."""

    def grouped(config: Configuration, weight: Tensor) -> Tensor:
        return weight.reshape(config.require_size(groups), -1)

    parts: tuple[tuple[str, str, Transform | None], ...] = (
        ("in_proj.*", "ssm_in.*", inputs),
        ("conv1d.weight", "ssm_conv1d.weight", squeezed),
        ("conv1d.bias", "ssm_conv1d.bias", None),
        ("A_log", "ssm_a", _rate_column),
        ("D", "ssm_d", _column),
        ("dt_bias", "ssm_dt.bias", None),
        ("norm.weight", "ssm_norm.weight", grouped),
        ("out_proj.*", "ssm_out.*", outputs),
    )
    return tuple(
        Rule(
            f"layers.{{n}}.{module}.{source}",
            f"blk.{{n}}.{target}",
            transform,
            optional=source in ("conv1d.bias", "norm.weight"),
            only=only,
            keep="proj" not in source,
        )
        for source, target, transform in parts
    )


def unlimited_steps(config: Configuration) -> None:
    """Refuses limits of steps, which files cannot express."""
    key = "time_step_limit"
    limits = config.derived(key, lambda c: [_number(limit) for limit in c.get(key, ())])
    if limits not in ([], [0.0, inf]):
        raise UnsupportedModelError(
            f"{config.path}: `{key}` limits steps to {limits}; files of this architecture cannot "
            "express limits."
        )


def _number(value: Any) -> float:
    """A number of config.json, where `transformers` writes infinity as an object."""
    return float(value["__float__"] if isinstance(value, Mapping) else value)


def _rate_column(config: Configuration, logarithms: Tensor) -> Tensor:
    return rates(config, logarithms).unsqueeze(1)


def _column(config: Configuration, row: Tensor) -> Tensor:
    return row.unsqueeze(1)

"""Parts of conversion tables of models with Mamba layers."""

from collections.abc import Callable

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Key, Rule, Transform
from model_zoo.convert.transforms import rates, squeezed

# The hidden size over the rank of steps where the rank is `auto`.
_PER_RANK = 16


def keys(*, expansion: str, state: str, taps: str, rank: str = "time_step_rank") -> tuple[Key, ...]:
    """Keys of the sizes; the arguments are the names of settings. expansion: that of the number of
    channels over the hidden size."""
    return (
        Key("ssm.conv_kernel", taps),
        Key("ssm.state_size", state),
        Key("ssm.time_step_rank", lambda c: _rank(c, rank)),
        Key("ssm.inner_size", lambda c: int(c.require(expansion) * c.require_size("hidden_size"))),
    )


def rules(
    module: str, *, only: Callable[[Configuration, int], bool] | None = None
) -> tuple[Rule, ...]:
    """Rules for a layer's part `module`."""
    parts: tuple[tuple[str, str, Transform | None], ...] = (
        ("in_proj.*", "ssm_in.*", None),
        ("conv1d.weight", "ssm_conv1d.weight", squeezed),
        ("conv1d.bias", "ssm_conv1d.bias", None),
        ("x_proj.weight", "ssm_x.weight", None),
        ("dt_proj.*", "ssm_dt.*", None),
        ("A_log", "ssm_a", rates),
        ("D", "ssm_d", None),
        ("out_proj.*", "ssm_out.*", None),
    )
    return tuple(
        Rule(
            f"layers.{{n}}.{module}.{source}",
            f"blk.{{n}}.{target}",
            transform,
            optional=source == "conv1d.bias",
            only=only,
            keep="proj" not in source,
        )
        for source, target, transform in parts
    )


def _rank(config: Configuration, setting: str) -> int:
    if config.get(setting, "auto") == "auto":
        return -(-config.require_size("hidden_size") // _PER_RANK)
    return config.require_size(setting)

"""Refusals: what a checkpoint may ask for and its architecture's files cannot say."""

from collections.abc import Callable

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.decoders import windows
from runtime.errors import UnsupportedModelError

Check = Callable[[Configuration], None]


def all_of(*checks: Check) -> Check:
    def check(config: Configuration) -> None:
        for one in checks:
            one(config)

    return check


def only_scalings(*known: str) -> Check:
    """Other ways of stretching the rotary embedding are refused."""

    def check(config: Configuration) -> None:
        kind = config.rope()["rope_type"]
        if kind not in ("default", *known):
            raise UnsupportedModelError(
                f"{config.path}: the rope scaling {kind} is not supported for this architecture; "
                f"supported are {', '.join(('default', *known))}."
            )

    return check


def no_windows(config: Configuration) -> None:
    """Settings of a window that no layer uses are common, and none."""
    listed = config.layer_types() or ()
    if config.get("use_sliding_window") and (not listed or "sliding_attention" in listed):
        raise UnsupportedModelError(
            f"{config.path}: has layers with a sliding window (`use_sliding_window`), which this "
            "architecture's files cannot tell."
        )


def every_nth_full(n: int) -> Check:
    """Layers with a window must alternate as readers of the file take for granted."""

    def check(config: Configuration) -> None:
        if windows(config, every=n) != [(layer + 1) % n != 0 for layer in range(config.layers)]:
            raise UnsupportedModelError(
                f"{config.path}: `layer_types` must have a window in all layers but one in {n}; "
                "this architecture's files cannot tell otherwise."
            )

    return check


def known_query_scale(largest: int) -> Check:
    """Readers scale queries by the head's size, in the model of `largest` layers by another."""

    def check(config: Configuration) -> None:
        scale, expected = config.require("query_pre_attn_scalar"), config.head_dim
        if config.layers == largest:
            expected = config.require_size("hidden_size") // config.require_size(
                "num_attention_heads"
            )
        if scale != expected:
            raise UnsupportedModelError(
                f"{config.path}: `query_pre_attn_scalar` is {scale}, where files of this "
                f"architecture mean {expected}."
            )

    return check

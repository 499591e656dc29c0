"""Checks that refuse checkpoints whose settings a GGUF file of the architecture cannot express."""

from typing import Any

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.decoders import looks_ahead, no_rope_interval, windows
from model_zoo.convert.mapping import Check
from runtime.errors import UnsupportedModelError


def all_of(*checks: Check) -> Check:
    def check(config: Configuration) -> None:
        for one in checks:
            one(config)

    return check


def only_scalings(*known: str) -> Check:
    """Refuses scalings of the rotary embedding other than `known`."""

    def check(config: Configuration) -> None:
        kind = config.rope()["rope_type"]
        if kind not in ("default", *known):
            raise UnsupportedModelError(
                f"{config.path}: the rope scaling {kind} is not supported for this architecture; "
                f"supported are {', '.join(('default', *known))}."
            )

    return check


def only_values(**expected: Any) -> Check:
    """Refuses other values of these settings; those that are absent count as expected."""

    def check(config: Configuration) -> None:
        for key, value in expected.items():
            stated = config.get(key, value)
            if stated != value:
                shown = repr(stated)[:80]
                raise UnsupportedModelError(
                    f"{config.path}: has {shown} as `{key}`, where files of this architecture mean "
                    f"{value!r}."
                )

    return check


def no_windows(config: Configuration) -> None:
    """Refuses sliding windows; many checkpoints state a window that no layer uses."""
    listed = config.layer_types()
    if config.get("use_sliding_window") if listed is None else "sliding_attention" in listed:
        raise UnsupportedModelError(
            f"{config.path}: has layers with a sliding window, which files of this architecture "
            "cannot express."
        )


def bidirectional(config: Configuration) -> None:
    """Refuses models whose tokens attend to earlier tokens only."""
    if not looks_ahead(config):
        raise UnsupportedModelError(
            f"{config.path}: tokens attend to earlier tokens only; in files of this architecture "
            "they attend to all."
        )


def experts_everywhere(config: Configuration) -> None:
    """Refuses layers without experts."""
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise UnsupportedModelError(
            f"{config.path}: has layers without experts, which this architecture's files "
            "cannot express."
        )


def every_nth_full(n: int) -> Check:
    """Refuses patterns of layers with a window other than the one that readers assume."""

    def check(config: Configuration) -> None:
        stated = config.derived("layer_types", lambda c: windows(c, every=n))
        if stated != [(layer + 1) % n != 0 for layer in range(config.layers)]:
            raise UnsupportedModelError(
                f"{config.path}: `layer_types` must have a window in all layers but one in {n}; "
                "files of this architecture cannot express other patterns."
            )

    return check


def every_nth_unrotated(n: int) -> Check:
    """Refuses intervals of layers without rotation other than the one that readers assume."""

    def check(config: Configuration) -> None:
        interval = config.derived("no_rope_layer_interval", no_rope_interval)
        if interval != n:
            raise UnsupportedModelError(
                f"{config.path}: one layer in {interval} has no rotation; in files of this "
                f"architecture it is one in {n}."
            )

    return check


def known_query_scale(largest: int | None = None) -> Check:
    """Refuses query scales other than the head size.

    For a model with `largest` layers, readers use hidden size / heads instead.
    """

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

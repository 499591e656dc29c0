"""Nemotron-H and its successors: conversion of text model checkpoints to GGUF."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from model_zoo.convert import checks, decoders, state_spaces
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import OUTPUT, TEXT_ROOTS, Conversion, Key, Rule
from model_zoo.models.nemotron_h.text import LATENT
from runtime.errors import UnsupportedModelError

_MAMBA, _ATTENTION, _DENSE, _EXPERTS = "mamba", "attention", "mlp", "moe"
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "-": _DENSE, "E": _EXPERTS}
# The list of layers in Nemotron 3 Puzzle, and the sizes that those with experts state.
_BLOCKS, _BY_LAYER = "block_configs", ("num_experts_per_tok", "moe_intermediate_size")
# Names of `transformers`, which also reads those above.
_NAMES = {"linear_attention": _MAMBA, "full_attention": _ATTENTION}


def _kinds(config: Configuration) -> Sequence[str]:
    """The kind of each layer, which settings list, with or without sizes, or give as letters."""
    listed = config.layer_types()
    if config.get(_BLOCKS) is not None:
        kinds = [block["block_type"] for block in config.get(_BLOCKS)]
    elif listed is None:
        kinds = [_LETTERS[letter] for letter in config.require("hybrid_override_pattern")]
    else:
        kinds = [_NAMES.get(kind, kind) for kind in listed]
    if len(kinds) != config.layers:
        raise config.error(f"states {config.layers} layers, and the kinds of {len(kinds)}")
    return kinds


def _is(*kinds: str) -> Callable[[Configuration, int], bool]:
    return lambda config, layer: _kinds(config)[layer] in kinds


def _by_layer(
    sizes: Callable[[Configuration, str], int],
) -> Callable[[Configuration], list[int]]:
    """A key's source: a number for the kind of each layer."""
    return lambda config: [sizes(config, kind) for kind in _kinds(config)]


def _kv_heads(config: Configuration, kind: str) -> int:
    return config.require_size("num_key_value_heads") if kind == _ATTENTION else 0


def _widths(config: Configuration) -> list[int]:
    """Per layer, the width of its feed-forward or of each expert; 0 for layers with neither."""
    of_experts = _of_each_layer(config, "moe_intermediate_size")
    return [
        config.require_size("intermediate_size") if kind == _DENSE else width
        for kind, width in zip(_kinds(config), of_experts, strict=True)
    ]


def _of_each_layer(config: Configuration, key: str) -> list[int]:
    """Per layer with experts, its own setting or else the global one; 0 for other layers."""
    blocks = config.get(_BLOCKS) or [{}] * config.layers
    return [
        int(block.get(key) or config.require_size(key)) if kind == _EXPERTS else 0
        for block, kind in zip(blocks, _kinds(config), strict=True)
    ]


def _sizes_of_experts(key: str) -> Callable[[Configuration], int | list[int]]:
    """The value of a key: one number, or one per layer if layers state their own."""

    def source(config: Configuration) -> int | list[int]:
        return _of_each_layer(config, key) if config.get(_BLOCKS) else config.require_size(key)

    return source


def _architecture(config: Configuration) -> str:
    return "nemotron_h_moe" if _has_experts(config) else "nemotron_h"


def _has_experts(config: Configuration) -> bool:
    return _EXPERTS in config.derived("hybrid_override_pattern", _kinds)


def _one_kind_of_feed_forward(config: Configuration) -> None:
    if _has_experts(config) and _DENSE in _kinds(config):
        raise UnsupportedModelError(
            f"{config.path}: has layers with experts and dense ones; files of this architecture "
            "have one kind of feed-forward."
        )


def _is_latent(config: Configuration, layer: int) -> bool:
    return bool(config.get(LATENT)) and _is(_EXPERTS)(config, layer)


def _squared_relu(config: Configuration) -> None:
    curve = config.get("mlp_hidden_act", "relu2")
    if curve != "relu2":
        raise UnsupportedModelError(
            f"{config.path}: `mlp_hidden_act` is {curve}; files of this architecture mean relu2."
        )


def _of_experts(key: Key) -> Key:
    """The same key, for models with experts."""
    source = key.source

    def of_experts(config: Configuration) -> Any:
        if not _has_experts(config):
            return None
        return source(config) if callable(source) else config.require(source)

    return Key(key.name, of_experts, of=key.of)


_MIXER = "layers.{n}.mixer"
_EXPERT_KEYS = (
    *(
        replace(key, source=_sizes_of_experts(key.source)) if key.source in _BY_LAYER else key
        for key in decoders.LEADING_DENSE_KEYS
        if key.name != "leading_dense_block_count"
    ),
    Key("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size"),
    *(key for key in decoders.SIGMOID_KEYS if key.name != "expert_gating_func"),
)

CONVERSION = Conversion(
    serves=("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM"),
    model_types=("nemotron_h",),
    architecture=_architecture,
    keys=(
        *(
            key
            for key in (*decoders.SIZES, *decoders.HEAD_SIZES)
            if key.name
            not in (
                "block_count",
                "feed_forward_length",
                "attention.head_count_kv",
                "attention.layer_norm_rms_epsilon",
            )
        ),
        Key("block_count", lambda c: c.layers),
        Key("attention.head_count_kv", _by_layer(_kv_heads)),
        Key("attention.layer_norm_rms_epsilon", "layer_norm_epsilon", of=float),
        # llama.cpp requires it, too.
        Key("attention.layer_norm_epsilon", "layer_norm_epsilon", of=float),
        Key("feed_forward_length", _widths),
        *map(_of_experts, _EXPERT_KEYS),
        Key(LATENT, LATENT, optional=True),
        *state_spaces.keys(
            heads="mamba_num_heads",
            head_dim="mamba_head_dim",
            groups="n_groups",
            state="ssm_state_size",
            taps="conv_kernel",
        ),
    ),
    rules=(
        Rule("embeddings.weight", "token_embd.weight"),
        Rule("norm_f.weight", "output_norm.weight"),
        Rule("lm_head.weight", OUTPUT),
        Rule("layers.{n}.norm.weight", "blk.{n}.attn_norm.weight"),
        *state_spaces.rules("mixer", groups="n_groups", only=_is(_MAMBA)),
        *(
            Rule(f"{_MIXER}.{name}_proj.*", f"blk.{{n}}.attn_{target}.*", only=_is(_ATTENTION))
            for name, target in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))
        ),
        *(
            Rule(f"{_MIXER}.{name}_proj.*", f"blk.{{n}}.ffn_{name}.*", only=_is(_DENSE))
            for name in ("up", "down")
        ),
        Rule(f"{_MIXER}.gate.weight", "blk.{n}.ffn_gate_inp.weight", only=_is(_EXPERTS)),
        Rule(
            f"{_MIXER}.gate.e_score_correction_bias",
            "blk.{n}.exp_probs_b.bias",
            only=_is(_EXPERTS),
        ),
        *(
            Rule(
                f"{_MIXER}.{module}.{name}_proj.weight",
                f"blk.{{n}}.ffn_{name}_{target}.weight",
                only=_is(_EXPERTS),
            )
            for module, target in (("experts.{e}", "exps"), ("shared_experts", "shexp"))
            for name in ("up", "down")
        ),
        *(
            Rule(f"{_MIXER}.{name}_latent_proj.*", f"blk.{{n}}.ffn_latent_{way}.*", only=_is_latent)
            for name, way in (("fc1", "down"), ("fc2", "up"))
        ),
    ),
    roots=("backbone.", *TEXT_ROOTS),
    drop=("mtp.**",),
    spellings={"head_dim": "attention_head_dim", "layer_types": "layers_block_type"},
    check=checks.all_of(
        _one_kind_of_feed_forward,
        _squared_relu,
        state_spaces.unlimited_steps,
    ),
)

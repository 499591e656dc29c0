"""Granite 3 and 4: conversion of text model checkpoints to GGUF."""

from collections.abc import Callable
from dataclasses import replace

from model_zoo.convert import checks, decoders, state_spaces
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.convert.transforms import first_half, second_half

_EXPERTS, _SHARED = "layers.{n}.block_sparse_moe", "layers.{n}.shared_mlp"
_MULTIPLIERS = (
    Key("attention.scale", "attention_multiplier", of=float),
    Key("embedding_scale", "embedding_multiplier", of=float),
    Key("residual_scale", "residual_multiplier", of=float),
    Key("logit_scale", "logits_scaling", of=float),
)
_EXPERT_RULES = (
    Rule(f"{_EXPERTS}.router.layer.weight", "blk.{n}.ffn_gate_inp.weight"),
    # The rows of the gate precede those of up.
    Rule(f"{_EXPERTS}.input_linear.weight", "blk.{n}.ffn_gate_exps.weight", first_half, each=True),
    Rule(f"{_EXPERTS}.input_linear.weight", "blk.{n}.ffn_up_exps.weight", second_half, each=True),
    Rule(f"{_EXPERTS}.output_linear.weight", "blk.{n}.ffn_down_exps.weight"),
)

CONVERSION = Conversion(
    serves=("GraniteForCausalLM",),
    model_types=("granite",),
    architecture="granite",
    keys=(*decoders.KEYS, *_MULTIPLIERS),
    rules=decoders.llama_rules(rotated=True),
    defaults={
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    check=checks.only_scalings(),
)

WITH_EXPERTS = replace(
    CONVERSION,
    serves=("GraniteMoeForCausalLM",),
    model_types=("granitemoe",),
    architecture="granitemoe",
    keys=(*CONVERSION.keys, *decoders.EXPERT_COUNTS),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(rotated=True),
        *_EXPERT_RULES,
        *decoders.PRE_NORMS,
    ),
)


def _one_rotation(config: Configuration) -> None:
    bases = set(_layer_bases(config)) - {0}
    if not bases <= {decoders.rope_base(config)}:
        raise config.error("has bases in `layer_rope_theta` other than `rope_theta` and 0")


def _layer_bases(config: Configuration) -> list[float]:
    """The base of each layer's rotation, 0 for none."""
    listed = config.get("layer_rope_theta")
    return listed or [decoders.rope_base(config)] * config.layers


def _windows(config: Configuration) -> list[bool]:
    """Whether each layer has a window: as listed, else all but every fourth, from the first."""
    listed = config.layer_types()
    if listed is None:
        return [layer % 4 != 0 for layer in range(config.layers)]
    return [kind == "sliding_attention" for kind in listed]


WINDOWED = replace(
    CONVERSION,
    serves=("GraniteSWAForCausalLM",),
    model_types=("granite_swa",),
    architecture={LLAMA_CPP: "granite_swa"},
    keys=(
        *CONVERSION.keys,
        Key("attention.sliding_window", "sliding_window"),
        Key("attention.sliding_window_pattern", _windows),
        Key("attention.rope_pattern", lambda c: [base != 0 for base in _layer_bases(c)]),
    ),
    rules=(
        *CONVERSION.rules,
        Rule("layers.{n}.self_attn.sinks", "blk.{n}.attn_sinks.weight"),
    ),
    defaults={**CONVERSION.defaults, "sliding_window": 128},
    check=checks.all_of(checks.only_scalings(), _one_rotation),
)


def _shares(config: Configuration, layer: int = 0) -> bool:
    return bool(config.get("shared_intermediate_size"))


WINDOWED_WITH_EXPERTS = replace(
    WINDOWED,
    serves=("GraniteMoeSWAForCausalLM",),
    model_types=("granitemoe_swa",),
    keys=(
        *WINDOWED.keys,
        *decoders.EXPERT_COUNTS,
        Key(
            "expert_shared_feed_forward_length",
            lambda c: c.require_size("shared_intermediate_size") if _shares(c) else None,
        ),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(rotated=True),
        WINDOWED.rules[-1],
        Rule(f"{_EXPERTS}.router.weight", "blk.{n}.ffn_gate_inp.weight"),
        *(
            Rule(f"{_EXPERTS}.experts.{source}", f"blk.{{n}}.ffn_{target}_exps.weight", each=True)
            for source, target in (("gate_up_proj", "gate_up"), ("down_proj", "down"))
        ),
        # The rows of the gate precede those of up, in the file, too.
        *(
            Rule(f"{_SHARED}.{source}.weight", f"blk.{{n}}.ffn_{target}_shexp.weight", only=_shares)
            for source, target in (("input_linear", "up"), ("output_linear", "down"))
        ),
        *decoders.PRE_NORMS,
    ),
)


def _attends(config: Configuration, layer: int) -> bool:
    listed = config.layer_types()
    return listed is not None and listed[layer] in ("attention", "full_attention")


def _recurs(config: Configuration, layer: int) -> bool:
    return not _attends(config, layer)


def _has_experts(config: Configuration, layer: int = 0) -> bool:
    return bool(config.get("num_local_experts"))


def _is_dense(config: Configuration, layer: int = 0) -> bool:
    return not _has_experts(config)


def _kv_heads(config: Configuration) -> list[int]:
    """The number of key heads of each layer, 0 for recurrent layers."""
    heads = config.get("num_key_value_heads") or config.require_size("num_attention_heads")
    return [heads if _attends(config, n) else 0 for n in range(config.layers)]


def _of_experts(setting: str) -> Callable[[Configuration], int | None]:
    """A key's source: the setting, if the model has experts."""
    return lambda config: config.require_size(setting) if _has_experts(config) else None


def _architecture(config: Configuration) -> str:
    """That of the hybrids, unless all layers attend, as in the smallest models of Granite 4.0."""
    if any(_recurs(config, n) for n in range(config.layers)):
        return "granitehybrid"
    return "granitemoe" if _has_experts(config) else "granite"


HYBRID = replace(
    CONVERSION,
    serves=("GraniteMoeHybridForCausalLM",),
    model_types=("granitemoehybrid",),
    architecture=_architecture,
    keys=(
        *(
            key
            for key in decoders.KEYS
            if key.name not in ("feed_forward_length", "attention.head_count_kv")
        ),
        *_MULTIPLIERS,
        Key("attention.head_count_kv", _kv_heads),
        # Whether positions are encoded at all.
        Key("rope.scaling.finetuned", lambda c: c.get("position_embedding_type") == "rope"),
        Key(
            "feed_forward_length",
            lambda c: c.require_size(
                "intermediate_size" if _has_experts(c) else "shared_intermediate_size"
            ),
        ),
        Key("expert_count", _of_experts("num_local_experts")),
        Key("expert_used_count", _of_experts("num_experts_per_tok")),
        Key("expert_shared_feed_forward_length", _of_experts("shared_intermediate_size")),
        *state_spaces.keys(
            heads="mamba_n_heads",
            head_dim="mamba_d_head",
            groups="mamba_n_groups",
            state="mamba_d_state",
            taps="mamba_d_conv",
        ),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(rotated=True, only=_attends),
        *state_spaces.rules("mamba", groups="mamba_n_groups", only=_recurs),
        *(replace(rule, only=_has_experts) for rule in _EXPERT_RULES),
        *(
            Rule(
                f"{_SHARED}.{source}_linear.weight",
                f"blk.{{n}}.ffn_{target}.weight",
                half,
                only=of,
            )
            for of, suffix in ((_has_experts, "_shexp"), (_is_dense, ""))
            for source, target, half in (
                ("input", f"gate{suffix}", first_half),
                ("input", f"up{suffix}", second_half),
                ("output", f"down{suffix}", None),
            )
        ),
        *decoders.PRE_NORMS,
    ),
    check=checks.all_of(checks.only_scalings(), state_spaces.unlimited_steps),
)

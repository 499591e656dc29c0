"""Step 3.5 Flash, and the text model of Step 3.7 Flash: conversion of checkpoints to GGUF."""

from collections.abc import Mapping
from typing import Any

from gguf import ExpertGatingFuncType
from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Computed, Conversion, Key, Rule
from model_zoo.convert.transforms import plus_one
from model_zoo.models.step35.text import EXPERT_LIMITS, NEAR_BASE, SHARED_LIMITS
from runtime.errors import UnsupportedModelError

FAR, NEAR = "full_attention", "sliding_attention"
# The rotated part of a head in layers of each kind, which files do not state.
_ROTATED = {FAR: 0.5, NEAR: 1.0}


def _listed(config: Configuration, key: str, default: Any = None) -> list[Any]:
    """The setting of each layer; published checkpoints list those of draft layers after them."""
    listed = config.get(key)
    listed = [default] * config.layers if listed is None else list(listed)[: config.layers]
    if len(listed) != config.layers:
        raise config.error(f"has {len(listed)} `{key}` for {config.layers} layers")
    return listed


def _kinds(config: Configuration) -> list[str]:
    return _listed(config, "layer_types", FAR)


def _slides(config: Configuration) -> list[bool]:
    return [kind == NEAR for kind in _kinds(config)]


def _other(config: Configuration, key: str, default: int) -> int:
    """A setting of layers with a window, in published checkpoints an object of its own."""
    return int((config.get("attention_other_setting") or {}).get(key) or default)


def _heads(config: Configuration) -> list[int]:
    far = config.require_size("num_attention_heads")
    near = config.get("num_sliding_attention_heads")
    near = _other(config, "num_attention_heads", far) if near is None else near
    return [near if slides else far for slides in _slides(config)]


def _key_heads(config: Configuration) -> list[int]:
    far = config.require_size("num_key_value_heads")
    near = _other(config, "num_attention_groups", far)
    return [near if slides else far for slides in _slides(config)]


def _rope(config: Configuration, kind: str) -> Mapping[str, Any]:
    """The rotary parameters of layers of that kind. Published checkpoints list base and rotated
    part of each layer; their scaling is that of layers without a window."""
    bases, kinds = config.get("rope_theta"), _kinds(config)
    if not isinstance(bases, list) or kind not in kinds:
        return config.rope(kind)
    first = kinds.index(kind)
    stated = {"rope_type": "default", "rope_theta": bases[first]}
    parts = config.get("partial_rotary_factors")
    if parts is not None:
        stated["partial_rotary_factor"] = parts[first]
    return stated | (dict(config.get("rope_scaling") or {}) if kind == FAR else {})


def _base(config: Configuration, kind: str) -> float:
    return float(_rope(config, kind)["rope_theta"])


def _factors(config: Configuration) -> Tensor | None:
    """float32 [head_dim / 2]: as in llama.cpp's files, those of a whole rotated head."""
    rope = _rope(config, FAR)
    if rope["rope_type"] != "llama3":
        return None
    return decoders.llama3_divisors(rope, config.head_dim, _base(config, FAR))


def _has_experts(config: Configuration, layer: int) -> bool:
    """As listed in words or, in published checkpoints, by numbers in a text; by default, all but
    the first three."""
    numbers = config.get("moe_layers_enum")
    if config.get("mlp_layer_types") is not None or numbers is None:
        usual = ["dense"] * 3 + ["sparse"] * config.layers
        return (config.get("mlp_layer_types") or usual)[layer] == "sparse"
    numbers = numbers.split(",") if isinstance(numbers, str) else numbers
    return layer in [int(number) for number in numbers]


def _is_dense(config: Configuration, layer: int) -> bool:
    return not _has_experts(config, layer)


def _leading_dense(config: Configuration) -> int:
    layers = range(config.layers)
    return next((n for n in layers if _has_experts(config, n)), config.layers)


def _limits(key: str, config: Configuration) -> list[float] | None:
    if config.get(key) is None:
        return None
    return [float(limit or 0) for limit in _listed(config, key)]


def _usual_rotation(config: Configuration) -> None:
    for kind in set(_kinds(config)):
        rope = _rope(config, kind)
        part = rope.get("partial_rotary_factor", 1.0)
        scalings = ("default", "llama3") if kind == FAR else ("default",)
        if part != _ROTATED.get(kind) or rope["rope_type"] not in scalings:
            raise UnsupportedModelError(
                f"{config.path}: layers of the kind {kind} rotate {part} of a head with the rope "
                f"scaling {rope['rope_type']}; files of this architecture mean half of a head "
                "without a window, scaled or not, and whole heads with one."
            )


def _experts(source: str, target: str, **conditions: Any) -> Rule:
    return Rule(f"layers.{{n}}.{source}", f"blk.{{n}}.{target}", only=_has_experts, **conditions)


CONVERSION = Conversion(
    serves=("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
    model_types=("step3p5",),
    architecture={LLAMA_CPP: "step35"},
    keys=(
        *(key for key in decoders.SIZES if not key.name.startswith("attention.head_count")),
        Key("attention.head_count", _heads),
        Key("attention.head_count_kv", _key_heads),
        *decoders.HEAD_SIZES,
        Key("attention.sliding_window", "sliding_window"),
        Key("attention.sliding_window_pattern", _slides),
        Key("rope.freq_base", lambda c: _base(c, FAR)),
        Key(NEAR_BASE, lambda c: _base(c, NEAR)),
        Key("leading_dense_block_count", _leading_dense),
        Key("expert_count", "n_routed_experts"),
        Key("expert_used_count", "num_experts_per_tok"),
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("expert_shared_feed_forward_length", "share_expert_dim"),
        Key("expert_weights_scale", "moe_router_scaling_factor", of=float),
        Key("expert_weights_norm", "norm_expert_weight", of=bool),
        Key("expert_gating_func", lambda c: ExpertGatingFuncType.SIGMOID.value),
        Key(EXPERT_LIMITS, lambda c: _limits("swiglu_limits", c)),
        Key(SHARED_LIMITS, lambda c: _limits("swiglu_limits_shared", c)),
    ),
    rules=(
        decoders.EMBEDDINGS[0],
        Rule("norm.weight", "output_norm.weight", plus_one),
        decoders.EMBEDDINGS[2],
        *decoders.attention(),
        Rule("layers.{n}.self_attn.g_proj.weight", "blk.{n}.attn_gate.weight"),
        *decoders.HEAD_NORMS_PLUS_ONE,
        *decoders.PRE_NORMS_PLUS_ONE,
        *decoders.feed_forward(only=_is_dense),
        _experts("moe.gate.weight", "ffn_gate_inp.weight"),
        _experts("moe.router_bias", "exp_probs_b.bias"),
        *(
            _experts(f"moe.{name}_proj.weight", f"ffn_{name}_exps.weight", each=True)
            for name in ("gate", "up", "down")
        ),
        *(
            _experts(f"share_expert.{name}_proj.weight", f"ffn_{name}_shexp.weight")
            for name in ("gate", "up", "down")
        ),
    ),
    computed=(Computed("rope_freqs.weight", _factors),),
    drop=(*decoders.OTHER_PARTS, "vit_large_projector.**"),
    defaults={"moe_router_scaling_factor": 1.0, "norm_expert_weight": True},
    spellings={
        "num_key_value_heads": "num_attention_groups",
        "n_routed_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k",
        "share_expert_dim": "share_expert_dims",
    },
    check=checks.all_of(
        _usual_rotation,
        checks.only_values(
            norm_expert_weight=True,
            moe_router_activation="sigmoid",
            use_moe_router_bias=True,
            use_head_wise_attn_gate=True,
        ),
    ),
    heads=(LLAMA_CPP,),
)

"""Gemma 4: conversion of text model checkpoints to GGUF."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Computed, Conversion, Key, Rule
from model_zoo.models.gemma4.text import FULL_EVERY
from runtime.errors import UnsupportedModelError


def _global_head_dim(config: Configuration) -> int:
    """The head size of layers without a window; newer settings list differences by layer."""
    return int(_of_global_layers(config, "head_dim", config.get("global_head_dim", 512)))


def _kv_heads(config: Configuration) -> list[int]:
    usual = config.require_size("num_key_value_heads")
    other = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    full = int(_of_global_layers(config, "num_key_value_heads", other or usual))
    return [usual if windowed else full for windowed in _windows(config)]


def _of_global_layers(config: Configuration, key: str, default: Any) -> Any:
    listed = config.get("per_layer_config") or {}
    for layer, windowed in enumerate(_windows(config)):
        if not windowed and isinstance(listed.get(str(layer)), Mapping):
            return listed[str(layer)].get(key, default)
    return default


def _windows(config: Configuration) -> list[bool]:
    """Whether each layer has a window; the last has none even if the settings list one."""
    return [*decoders.windows(config, every=FULL_EVERY)[:-1], False]


def _first_shared(config: Configuration) -> int:
    return config.layers - int(config.get("num_kv_shared_layers", 0))


def _stores(config: Configuration, layer: int) -> bool:
    """Whether the layer has its own keys and values."""
    return layer < _first_shared(config)


def _has_values(config: Configuration, layer: int) -> bool:
    same = bool(config.get("attention_k_eq_v")) and not _windows(config)[layer]
    return _stores(config, layer) and not same


def _feed_forward_sizes(config: Configuration) -> int | list[int]:
    size, shared = config.require_size("intermediate_size"), _first_shared(config)
    if not config.get("use_double_wide_mlp"):
        return size
    return [size if layer < shared else 2 * size for layer in range(config.layers)]


def _partly_rotated(config: Configuration) -> Tensor:
    """Divisors of the frequencies of layers without a window; infinite for unrotated pairs."""
    head_dim, rope = _global_head_dim(config), config.rope()
    if rope["rope_type"] == "default":
        return torch.ones(head_dim // 2)
    factors = torch.full((head_dim // 2,), 1e30)
    turning = int(float(rope.get("partial_rotary_factor", 1.0)) * head_dim // 2)
    factors[:turning] = float(rope.get("factor", 1.0))
    return factors


def _if_experts(source: str) -> Callable[[Configuration], Any]:
    return lambda config: config.require(source) if config.get("enable_moe_block") else None


def _routed(config: Configuration, layer: int) -> bool:
    return bool(config.get("enable_moe_block"))


def _has_inputs(config: Configuration, layer: int = 0) -> bool:
    return bool(config.get("hidden_size_per_layer_input"))


def _norm(source: str, target: str, **conditions: Any) -> Rule:
    return Rule(f"layers.{{n}}.{source}.weight", f"blk.{{n}}.{target}.weight", **conditions)


def _only_known(config: Configuration) -> None:
    """Checks that layers with a window rotate whole heads, and that text is causal."""
    local = config.rope("sliding_attention")["rope_type"]
    if local != "default" or config.get("use_bidirectional_attention") == "all":
        raise UnsupportedModelError(
            f"{config.path}: has rope parameters of layers with a window ({local}) or a direction "
            f"of attention that this architecture's files cannot express."
        )


CONVERSION = Conversion(
    serves=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    architecture="gemma4",
    keys=(
        *(
            key
            for key in decoders.SIZES
            if key.name not in ("feed_forward_length", "attention.head_count_kv")
        ),
        Key("feed_forward_length", _feed_forward_sizes),
        Key("attention.head_count_kv", _kv_heads),
        Key("attention.key_length", _global_head_dim),
        Key("attention.value_length", _global_head_dim),
        Key("attention.key_length_swa", "head_dim"),
        Key("attention.value_length_swa", "head_dim"),
        Key("attention.sliding_window", "sliding_window"),
        Key("attention.sliding_window_pattern", _windows),
        Key("attention.shared_kv_layers", "num_kv_shared_layers"),
        Key("rope.freq_base", decoders.rope_base),
        Key("rope.freq_base_swa", lambda c: decoders.rope_base(c, "sliding_attention")),
        Key("rope.dimension_count", _global_head_dim),
        Key("rope.dimension_count_swa", "head_dim"),
        Key("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
        # Readers use a cap of 30 if a file states none.
        Key("final_logit_softcapping", lambda c: float(c.get("final_logit_softcapping", 0.0))),
        Key("expert_count", _if_experts("num_experts")),
        Key("expert_used_count", _if_experts("top_k_experts")),
        Key("expert_feed_forward_length", _if_experts("moe_intermediate_size")),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        Rule("embed_tokens_per_layer.weight", "per_layer_token_embd.weight", only=_has_inputs),
        Rule("per_layer_model_projection.weight", "per_layer_model_proj.weight", only=_has_inputs),
        Rule("per_layer_projection_norm.weight", "per_layer_proj_norm.weight", only=_has_inputs),
        Rule("layers.{n}.self_attn.q_proj.*", "blk.{n}.attn_q.*"),
        Rule("layers.{n}.self_attn.k_proj.*", "blk.{n}.attn_k.*", only=_stores),
        Rule("layers.{n}.self_attn.v_proj.*", "blk.{n}.attn_v.*", only=_has_values),
        Rule("layers.{n}.self_attn.o_proj.*", "blk.{n}.attn_output.*"),
        _norm("self_attn.q_norm", "attn_q_norm"),
        _norm("self_attn.k_norm", "attn_k_norm", only=_stores),
        *decoders.feed_forward(),
        _norm("input_layernorm", "attn_norm"),
        _norm("post_attention_layernorm", "post_attention_norm"),
        _norm("pre_feedforward_layernorm", "ffn_norm"),
        _norm("post_feedforward_layernorm", "post_ffw_norm"),
        Rule("layers.{n}.layer_scalar", "blk.{n}.layer_output_scale.weight", optional=True),
        _norm("per_layer_input_gate", "inp_gate", only=_has_inputs),
        _norm("per_layer_projection", "proj", only=_has_inputs),
        _norm("post_per_layer_input_norm", "post_norm", only=_has_inputs),
        _norm("router.proj", "ffn_gate_inp", only=_routed),
        Rule("layers.{n}.router.scale", "blk.{n}.ffn_gate_inp.scale", only=_routed),
        Rule("layers.{n}.router.per_expert_scale", "blk.{n}.ffn_down_exps.scale", only=_routed),
        Rule(
            "layers.{n}.experts.gate_up_proj",
            "blk.{n}.ffn_gate_up_exps.weight",
            each=True,
            only=_routed,
        ),
        Rule(
            "layers.{n}.experts.down_proj", "blk.{n}.ffn_down_exps.weight", each=True, only=_routed
        ),
        _norm("post_feedforward_layernorm_1", "post_ffw_norm_1", only=_routed),
        _norm("pre_feedforward_layernorm_2", "pre_ffw_norm_2", only=_routed),
        _norm("post_feedforward_layernorm_2", "post_ffw_norm_2", only=_routed),
    ),
    computed=(Computed("rope_freqs.weight", _partly_rotated),),
    # Layers that share keys and values may still have their unused projections.
    drop=(
        *decoders.OTHER_PARTS,
        "layers.{n}.self_attn.k_proj.weight",
        "layers.{n}.self_attn.v_proj.weight",
        "layers.{n}.self_attn.k_norm.weight",
        "vision_embedder.**",
    ),
    defaults={
        "vocab_size": 262144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "tie_word_embeddings": True,
    },
    check=checks.all_of(checks.only_scalings("proportional"), _only_known),
    tokenizer="gemma4",
)


# The 12B model, whose settings omit the parts that it lacks.
UNIFIED = replace(
    CONVERSION,
    serves=("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
    defaults={
        **CONVERSION.defaults,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
)

"""Llama 4: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule, Transform
from model_zoo.convert.transforms import after_transposing, first_half, second_half, transposed


def _has_experts(config: Configuration, layer: int) -> bool:
    step = config.require_size("interleave_moe_layer_step")
    listed = config.get("moe_layers")
    return layer in listed if listed else (layer + 1) % step == 0


def _experts(name: str, target: str, transform: Transform) -> tuple[Rule, ...]:
    """A rule for a matrix stored as [experts, in, out]; the gate's columns precede those of up."""
    source = f"layers.{{n}}.feed_forward.experts.{name}"
    return (Rule(source, f"blk.{{n}}.{target}.weight", transform, each=True, only=_has_experts),)


CONVERSION = Conversion(
    serves=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    architecture="llama4",
    keys=(
        *(key for key in decoders.KEYS if key.name != "feed_forward_length"),
        Key("feed_forward_length", "intermediate_size_mlp"),
        Key("expert_feed_forward_length", "intermediate_size"),
        *decoders.EXPERT_COUNTS,
        Key("interleave_moe_layer_step", "interleave_moe_layer_step"),
        Key("no_rope_interval", decoders.no_rope_interval),
        Key("use_qk_norm", "use_qk_norm", of=bool),
        Key("attention.head_dim", lambda c: c.head_dim),
        Key("attention.chunk_size", "attention_chunk_size"),
        Key("attention.temperature_tuning", "attn_temperature_tuning", of=bool),
        Key("attention.scale", "attn_scale", of=float),
        Key("attention.floor_scale", "floor_scale", of=int),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.feed_forward("feed_forward", only=lambda c, n: not _has_experts(c, n)),
        Rule(
            "layers.{n}.feed_forward.router.weight",
            "blk.{n}.ffn_gate_inp.weight",
            only=_has_experts,
        ),
        *_experts("gate_up_proj", "ffn_gate_exps", after_transposing(first_half)),
        *_experts("gate_up_proj", "ffn_up_exps", after_transposing(second_half)),
        *_experts("down_proj", "ffn_down_exps", transposed),
        *decoders.shared_experts("feed_forward.shared_expert", only=_has_experts),
        *decoders.PRE_NORMS,
    ),
    computed=(decoders.LLAMA3_FACTORS,),
    drop=decoders.OTHER_PARTS,
    defaults={
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "num_experts_per_tok": 1,
    },
    check=checks.only_scalings("llama3"),
)

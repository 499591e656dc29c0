"""Hunyuan 3: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule


def _shared_width(config: Configuration) -> int:
    return config.require_size("n_shared_experts") * config.require_size("moe_intermediate_size")


CONVERSION = Conversion(
    serves=("HYV3ForCausalLM",),
    model_types=("hy_v3",),
    architecture={LLAMA_CPP: "hy_v3"},
    keys=(
        *decoders.KEYS,
        *decoders.LEADING_DENSE_KEYS,
        *(key for key in decoders.SIGMOID_KEYS if "group" not in key.name),
        Key("expert_shared_feed_forward_length", _shared_width),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.feed_forward(only=decoders.is_leading),
        Rule(
            "layers.{n}.mlp.router.gate.weight",
            "blk.{n}.ffn_gate_inp.weight",
            only=decoders.follows,
        ),
        Rule("layers.{n}.mlp.expert_bias", "blk.{n}.exp_probs_b", only=decoders.follows),
        *decoders.experts(only=decoders.follows)[1:],
        *decoders.shared_experts("mlp.shared_mlp", only=decoders.follows),
        *decoders.PRE_NORMS,
        *decoders.HEAD_NORMS,
    ),
    spellings={
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "route_norm",
        "routed_scaling_factor": "router_scaling_factor",
    },
    defaults={"norm_topk_prob": True},
    check=checks.all_of(
        checks.only_scalings(),
        checks.no_windows,
        checks.only_values(
            qk_norm=True, moe_router_use_sigmoid=True, moe_router_enable_expert_bias=True
        ),
    ),
)

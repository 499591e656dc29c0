"""Arcee's Trinity: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule


def _of_experts(source: str, target: str) -> Rule:
    return Rule(f"layers.{{n}}.mlp.{source}", f"blk.{{n}}.{target}", only=decoders.follows)


CONVERSION = Conversion(
    serves=("AfmoeForCausalLM",),
    model_types=("afmoe",),
    architecture="afmoe",
    keys=(
        *decoders.KEYS,
        *decoders.LEADING_DENSE_KEYS,
        *decoders.SIGMOID_KEYS,
        Key("attention.sliding_window", "sliding_window"),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        Rule("layers.{n}.self_attn.gate_proj.weight", "blk.{n}.attn_gate.weight"),
        *decoders.HEAD_NORMS,
        *decoders.feed_forward(only=decoders.is_leading),
        _of_experts("router.gate.weight", "ffn_gate_inp.weight"),
        *decoders.experts(only=decoders.follows)[1:],
        *decoders.shared_experts(only=decoders.follows),
        _of_experts("expert_bias", "exp_probs_b.bias"),
        *(
            Rule(f"layers.{{n}}.{source}.weight", f"blk.{{n}}.{target}.weight")
            for source, target in (
                ("input_layernorm", "attn_norm"),
                ("post_attention_layernorm", "post_attention_norm"),
                ("pre_mlp_layernorm", "ffn_norm"),
                ("post_mlp_layernorm", "post_ffw_norm"),
            )
        ),
    ),
    # As in AfmoeConfig of `transformers`, which always renormalises weights.
    defaults={"mup_enabled": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    spellings={
        "first_k_dense_replace": "num_dense_layers",
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "route_norm",
        "routed_scaling_factor": "route_scale",
        "sliding_window_pattern": "global_attn_every_n_layers",
    },
    check=checks.all_of(
        checks.only_scalings(),
        checks.every_nth_full(4),
        # Files do not state that embeddings are scaled; all published models' are.
        checks.only_values(mup_enabled=True, score_func="sigmoid"),
    ),
    heads=(LLAMA_CPP,),
)

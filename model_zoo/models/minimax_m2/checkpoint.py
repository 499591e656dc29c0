"""MiniMax M2: conversion of text model checkpoints to GGUF."""

from gguf import ExpertGatingFuncType

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule

_EXPERTS = "block_sparse_moe"


CONVERSION = Conversion(
    serves=("MiniMaxM2ForCausalLM",),
    model_types=("minimax_m2",),
    architecture="minimax-m2",
    keys=(
        *decoders.KEYS,
        *decoders.EXPERT_COUNTS,
        Key("expert_feed_forward_length", "intermediate_size"),
        Key("expert_gating_func", lambda c: ExpertGatingFuncType.SIGMOID.value),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.experts(_EXPERTS, names=("w1", "w3", "w2")),
        Rule(f"layers.{{n}}.{_EXPERTS}.e_score_correction_bias", "blk.{n}.exp_probs_b.bias"),
        *decoders.PRE_NORMS,
        *decoders.HEAD_NORMS,
    ),
    check=checks.all_of(
        checks.only_scalings(),
        checks.only_values(
            scoring_func="sigmoid",
            use_routing_bias=True,
            shared_intermediate_size=0,
            use_qk_norm=True,
            qk_norm_type="per_layer",
        ),
    ),
    heads=(LLAMA_CPP,),
)

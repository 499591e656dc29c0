"""Ling and Ring 2.0: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Rule

_ATTENTION = "layers.{n}.attention"

CONVERSION = Conversion(
    serves=("BailingMoeV2ForCausalLM",),
    architecture="bailingmoe2",
    keys=(
        *decoders.KEYS,
        *decoders.YARN_SCALING,
        *decoders.LEADING_DENSE_KEYS,
        *decoders.SIGMOID_KEYS,
    ),
    rules=(
        Rule("word_embeddings.weight", "token_embd.weight"),
        *decoders.EMBEDDINGS[1:],
        Rule(f"{_ATTENTION}.query_key_value.*", "blk.{n}.attn_qkv.*"),
        Rule(f"{_ATTENTION}.dense.*", "blk.{n}.attn_output.*"),
        Rule(f"{_ATTENTION}.query_layernorm.weight", "blk.{n}.attn_q_norm.weight"),
        Rule(f"{_ATTENTION}.key_layernorm.weight", "blk.{n}.attn_k_norm.weight"),
        *decoders.LEADING_DENSE,
        Rule(
            "layers.{n}.mlp.gate.expert_bias",
            "blk.{n}.exp_probs_b.bias",
            optional=True,
            only=decoders.follows,
        ),
        *decoders.PRE_NORMS,
    ),
    # As in the authors' BailingMoeV2Config.
    defaults={"partial_rotary_factor": 0.5, "n_group": 1, "topk_group": 1},
    spellings={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    check=checks.all_of(
        checks.only_scalings("yarn"),
        checks.no_windows,
        checks.only_values(score_function="sigmoid", use_qk_norm=True),
    ),
    heads=(LLAMA_CPP,),
)

"""K-EXAONE: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule


def _shared_width(config: Configuration) -> int:
    return config.require_size("n_shared_experts") * config.require_size("moe_intermediate_size")


CONVERSION = Conversion(
    serves=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
    model_types=("exaone_moe",),
    architecture="exaone-moe",
    keys=(
        *decoders.KEYS,
        *decoders.LEADING_DENSE_KEYS,
        *decoders.SIGMOID_KEYS,
        Key("expert_shared_feed_forward_length", _shared_width),
        Key("attention.sliding_window", "sliding_window"),
        Key("attention.sliding_window_pattern", lambda c: decoders.windows(c, every=4)),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.LEADING_DENSE,
        Rule(
            "layers.{n}.mlp.e_score_correction_bias",
            "blk.{n}.exp_probs_b.bias",
            only=decoders.follows,
        ),
        *decoders.PRE_NORMS,
        *decoders.HEAD_NORMS,
    ),
    computed=(decoders.LLAMA3_FACTORS,),
    drop=("mtp.**",),
    defaults={"n_group": 1, "topk_group": 1},
    spellings={
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "first_k_dense_replace": "first_last_k_dense_replace",  # of the first revisions
    },
    check=checks.only_scalings("llama3"),
    heads=(LLAMA_CPP,),
)

"""LFM2: conversion of text model checkpoints to GGUF."""

from typing import Any

from gguf import ExpertGatingFuncType

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, OUTPUT, Conversion, Key, Rule
from model_zoo.convert.transforms import squeezed


def _attends(config: Configuration, layer: int) -> bool:
    listed = config.layer_types()
    if listed is not None:
        return listed[layer] != "conv"
    attending = config.get("full_attn_idxs")
    return attending is None or layer in attending


def _convolves(config: Configuration, layer: int) -> bool:
    return not _attends(config, layer)


def _key_heads(config: Configuration) -> list[int]:
    """The number of key heads of each layer, 0 for convolutions."""
    heads = config.require_size("num_key_value_heads")
    return [heads if _attends(config, layer) else 0 for layer in range(config.layers)]


def _width(config: Configuration) -> int:
    """The width of the feed-forwards, from the width that the settings are based on."""
    width = int(config.get("block_ff_dim") or config.require_size("intermediate_size"))
    if not config.get("block_auto_adjust_ff_dim"):
        return width
    width, multiple = 2 * width // 3, config.require_size("block_multiple_of")
    width = int(config.require("block_ffn_dim_multiplier") * width)
    return -(-width // multiple) * multiple


def _is_dense(config: Configuration, layer: int) -> bool:
    return bool(layer < config.require("num_dense_layers"))


def _has_experts(config: Configuration, layer: int) -> bool:
    return not _is_dense(config, layer)


def _has_biased_scores(config: Configuration, layer: int) -> bool:
    return _has_experts(config, layer) and bool(config.require("use_expert_bias"))


def _feed_forward(**conditions: Any) -> tuple[Rule, ...]:
    return tuple(
        Rule(
            f"layers.{{n}}.feed_forward.{source}.weight",
            f"blk.{{n}}.ffn_{target}.weight",
            **conditions,
        )
        for source, target in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    )


OWN_KEYS = ("feed_forward_length", "attention.head_count_kv")
KEYS = (
    *(key for key in decoders.KEYS if key.name not in OWN_KEYS),
    Key("attention.head_count_kv", _key_heads),
    Key("shortconv.l_cache", "conv_L_cache"),
)


ATTENTION = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "out_proj": "attn_output",
    "q_layernorm": "attn_q_norm",
    "k_layernorm": "attn_k_norm",
}
RULES = (
    Rule("embed_tokens.weight", "token_embd.weight"),
    Rule("embedding_norm.weight", "token_embd_norm.weight", flavours=(LLAMA_CPP,)),
    Rule("embedding_norm.weight", "output_norm.weight", flavours=(OLLAMA,)),
    Rule("lm_head.weight", OUTPUT),
    Rule("layers.{n}.operator_norm.weight", "blk.{n}.attn_norm.weight"),
    Rule("layers.{n}.ffn_norm.weight", "blk.{n}.ffn_norm.weight"),
    *(
        Rule(f"layers.{{n}}.self_attn.{source}.weight", f"blk.{{n}}.{target}.weight", only=_attends)
        for source, target in ATTENTION.items()
    ),
    *(
        Rule(
            f"layers.{{n}}.conv.{name}.weight",
            f"blk.{{n}}.shortconv.{name}.weight",
            only=_convolves,
        )
        for name in ("in_proj", "out_proj")
    ),
    Rule(
        "layers.{n}.conv.conv.weight",
        "blk.{n}.shortconv.conv.weight",
        squeezed,
        only=_convolves,
        keep=True,
    ),
)


SPELLINGS = {"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding"}
DEFAULTS = {
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "conv_L_cache": 3,
    "norm_eps": 1e-5,
    "max_position_embeddings": 128_000,
}


CONVERSION = Conversion(
    serves=("Lfm2ForCausalLM", "LFM2ForCausalLM"),
    model_types=("lfm2",),
    architecture="lfm2",
    keys=(*KEYS, Key("feed_forward_length", _width)),
    rules=(*RULES, *_feed_forward()),
    drop=decoders.OTHER_PARTS,
    defaults={
        **DEFAULTS,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
    spellings=SPELLINGS,
    check=checks.only_scalings(),
)


MOE = Conversion(
    serves=("Lfm2MoeForCausalLM",),
    model_types=("lfm2_moe",),
    architecture="lfm2moe",
    keys=(
        *KEYS,
        Key("feed_forward_length", "intermediate_size"),
        *decoders.EXPERT_COUNTS,
        Key("leading_dense_block_count", "num_dense_layers"),
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("expert_gating_func", lambda c: ExpertGatingFuncType.SIGMOID.value),
        Key("expert_weights_norm", "norm_topk_prob", of=bool),
        Key("expert_weights_scale", "routed_scaling_factor", of=float),
    ),
    rules=(
        *RULES,
        *_feed_forward(only=_is_dense),
        *decoders.experts("feed_forward", names=("w1", "w3", "w2"), only=_has_experts),
        Rule(
            "layers.{n}.feed_forward.expert_bias",
            "blk.{n}.exp_probs_b.bias",
            only=_has_biased_scores,
        ),
    ),
    defaults={
        **DEFAULTS,
        "num_dense_layers": 2,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    spellings=SPELLINGS,
    check=checks.only_scalings(),
)

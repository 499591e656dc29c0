"""Kimi Linear: conversion of text model checkpoints to GGUF."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from model_zoo.convert import checks, decoders, latent_rules
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.convert.transforms import rates
from model_zoo.models.kimi_linear.text import HEAD_DIM
from runtime.errors import UnsupportedModelError


def _recurrent(config: Configuration) -> Sequence[bool]:
    """Whether each layer is recurrent: as listed, or as numbered from 1 in published settings."""
    listed = config.layer_types()
    if listed is not None:
        return [kind == "linear_attention" for kind in listed]
    numbered = config.require("linear_attn_config")["kda_layers"]
    return [layer + 1 in numbered for layer in range(config.layers)]


def _recurs(config: Configuration, layer: int) -> bool:
    return _recurrent(config)[layer]


def _attends(config: Configuration, layer: int) -> bool:
    return not _recurs(config, layer)


def _of_delta(name: str, published: str) -> Any:
    """A key's source: a setting of recurrent layers."""

    def source(config: Configuration) -> int:
        nested = config.get("linear_attn_config") or {}
        return int(nested[published] if published in nested else config.require(name))

    return source


_HEADS = _of_delta("linear_num_heads", "num_heads")


def _as_many_heads(config: Configuration) -> None:
    heads, others = config.derived("linear_num_heads", _HEADS), config.get("num_attention_heads")
    if heads != others:
        raise UnsupportedModelError(
            f"{config.path}: recurrent layers have {heads} heads and attention {others}; files of "
            "this architecture state one number for both."
        )


def _rate_column(config: Configuration, logarithms: Tensor) -> Tensor:
    return rates(config, logarithms).reshape(-1, 1)


def _taps(config: Configuration, factors: Tensor) -> Tensor:
    """[channels, taps], or with an axis between -> [1, channels, 1, taps]."""
    return factors.reshape(1, factors.shape[0], 1, -1)


def _delta(source: str, target: str, transform: Any = None, *, keep: bool = False) -> Rule:
    return Rule(
        f"layers.{{n}}.self_attn.{source}",
        f"blk.{{n}}.{target}",
        transform,
        only=_recurs,
        keep=keep,
    )


CONVERSION = Conversion(
    serves=("KimiLinearForCausalLM",),
    model_types=("kimi_linear",),
    architecture={LLAMA_CPP: "kimi-linear"},
    keys=(
        *(key for key in decoders.SIZES if key.name != "attention.head_count_kv"),
        Key("attention.head_count_kv", lambda c: [0 if r else 1 for r in _recurrent(c)]),
        *latent_rules.SIZES,
        Key(HEAD_DIM, _of_delta("linear_head_dim", "head_dim")),
        Key("ssm.conv_kernel", _of_delta("linear_conv_kernel_dim", "short_conv_kernel_size")),
        *decoders.LEADING_DENSE_KEYS,
        *decoders.SIGMOID_KEYS,
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *latent_rules.projections(_attends),
        *latent_rules.head_matrices(_attends),
        *(_delta(f"{name}_proj.weight", f"attn_{name}.weight") for name in "qkv"),
        *(
            _delta(f"{name}_conv1d.weight", f"ssm_conv1d_{name}.weight", _taps, keep=True)
            for name in "qkv"
        ),
        *(
            _delta(f"{name}_{part}_proj.weight", f"ssm_{name}_{part}.weight")
            for name in "fg"
            for part in "ab"
        ),
        _delta("b_proj.weight", "ssm_beta.weight"),
        _delta("A_log", "ssm_a", _rate_column, keep=True),
        _delta("dt_bias", "ssm_dt.bias", keep=True),
        _delta("o_norm.weight", "ssm_norm.weight"),
        _delta("o_proj.weight", "attn_output.weight"),
        # In published checkpoints, and as `transformers` saves them.
        *decoders.feed_forward(only=decoders.is_leading),
        *decoders.feed_forward("block_sparse_moe", only=decoders.is_leading),
        *decoders.experts("block_sparse_moe", names=("w1", "w3", "w2"), only=decoders.follows),
        Rule(
            "layers.{n}.block_sparse_moe.gate.e_score_correction_bias",
            "blk.{n}.exp_probs_b.bias",
            only=decoders.follows,
        ),
        *decoders.shared_experts("block_sparse_moe.shared_experts", only=decoders.follows),
        *decoders.PRE_NORMS,
    ),
    defaults={"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    spellings={
        "max_position_embeddings": "model_max_length",
        "n_group": "num_expert_group",
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "moe_renormalize",
        "num_experts_per_tok": "num_experts_per_token",
    },
    check=checks.all_of(
        _as_many_heads, checks.only_values(moe_router_activation_func="sigmoid", mla_use_nope=True)
    ),
    heads=(LLAMA_CPP,),
)

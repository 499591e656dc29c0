"""Falcon: conversion of text model checkpoints to GGUF."""

import torch
from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule
from model_zoo.convert.transforms import attention_parts
from runtime.errors import UnsupportedModelError


def _key_heads(config: Configuration) -> int:
    if not config.get("new_decoder_architecture") and config.get("multi_query"):
        return 1
    heads = config.get("num_kv_heads") or config.require("num_attention_heads")
    return int(heads)


def _joined_by_kind(config: Configuration, rows: Tensor) -> Tensor:
    return torch.cat(attention_parts(rows, _key_heads(config), config.head_dim))


def _norms(config: Configuration) -> int:
    """The number of norms of a layer."""
    larger = bool(config.get("new_decoder_architecture"))
    return int(config.get("num_ln_in_parallel_attn") or 1 + larger)


def _has_one_norm(config: Configuration, layer: int) -> bool:
    return _norms(config) == 1


def _has_two_norms(config: Configuration, layer: int) -> bool:
    return _norms(config) == 2


def _parallel(config: Configuration) -> None:
    if not (config.get("new_decoder_architecture") or config.get("parallel_attn")):
        raise UnsupportedModelError(
            f"{config.path}: attention precedes the feed-forward (`parallel_attn`); in files of "
            "this architecture they are in parallel."
        )


_OTHERS = ("attention.head_count_kv", "feed_forward_length")

CONVERSION = Conversion(
    serves=("FalconForCausalLM", "RWForCausalLM"),
    model_types=("falcon",),
    architecture="falcon",
    keys=(
        *(k for k in decoders.layer_normed("layer_norm_epsilon") if k.name not in _OTHERS),
        Key("attention.head_count_kv", _key_heads),
        Key(
            "feed_forward_length",
            lambda c: c.get("ffn_hidden_size") or 4 * c.require_size("hidden_size"),
        ),
    ),
    rules=(
        Rule("word_embeddings.weight", "token_embd.weight"),
        Rule("ln_f.*", "output_norm.*"),
        decoders.EMBEDDINGS[2],
        Rule(
            "h.{n}.self_attention.query_key_value.weight",
            "blk.{n}.attn_qkv.weight",
            _joined_by_kind,
        ),
        Rule("h.{n}.self_attention.dense.weight", "blk.{n}.attn_output.weight"),
        Rule("h.{n}.mlp.dense_h_to_4h.weight", "blk.{n}.ffn_up.weight"),
        Rule("h.{n}.mlp.dense_4h_to_h.weight", "blk.{n}.ffn_down.weight"),
        Rule("h.{n}.input_layernorm.*", "blk.{n}.attn_norm.*", only=_has_one_norm),
        Rule("h.{n}.ln_mlp.*", "blk.{n}.attn_norm.*", only=_has_two_norms),
        Rule("h.{n}.ln_attn.*", "blk.{n}.attn_norm_2.*", only=_has_two_norms),
    ),
    roots=("transformer.",),
    drop=("h.{n}.self_attention.rotary.inv_freq", "h.{n}.self_attention.maybe_rotary.inv_freq"),
    spellings={
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_kv_heads": "n_head_kv",
    },
    defaults={
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048,
        "multi_query": True,
        "parallel_attn": True,
        "tie_word_embeddings": True,
    },
    check=checks.all_of(
        checks.only_scalings(),
        checks.only_values(alibi=False, bias=False, activation="gelu"),
        _parallel,
    ),
)

"""Ling and Ring 1 and 1.5: conversion of text model checkpoints to GGUF."""

from functools import partial

from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.convert.transforms import interleaved

_ATTENTION = "layers.{n}.attention"
_HEADS, _KEY_HEADS = "num_attention_heads", "num_key_value_heads"


def _part(which: int, config: Configuration, rows: Tensor) -> Tensor:
    """Queries, keys or values of the stored matrix, which has all three."""
    counts = (config.require_size(key) for key in (_HEADS, _KEY_HEADS, _KEY_HEADS))
    return rows.split([count * config.head_dim for count in counts])[which]


def _queries(config: Configuration, rows: Tensor) -> Tensor:
    return interleaved(_HEADS)(config, _part(0, config, rows))


def _keys(config: Configuration, rows: Tensor) -> Tensor:
    return interleaved(_KEY_HEADS)(config, _part(1, config, rows))


CONVERSION = Conversion(
    serves=("BailingMoeForCausalLM",),
    architecture="bailingmoe",
    keys=(
        *decoders.KEYS,
        *decoders.YARN_SCALING,
        *(key for key in decoders.LEADING_DENSE_KEYS if key.name != "expert_weights_scale"),
        Key("expert_weights_norm", "norm_topk_prob", of=bool),
    ),
    rules=(
        Rule("word_embeddings.weight", "token_embd.weight"),
        *decoders.EMBEDDINGS[1:],
        *(
            Rule(f"{_ATTENTION}.query_key_value.*", f"blk.{{n}}.attn_{target}.*", transform)
            for target, transform in (("q", _queries), ("k", _keys), ("v", partial(_part, 2)))
        ),
        Rule(f"{_ATTENTION}.dense.*", "blk.{n}.attn_output.*"),
        *decoders.experts(),
        *decoders.shared_experts(),
        *decoders.PRE_NORMS,
    ),
    defaults={"first_k_dense_replace": 0},
    spellings={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    check=checks.all_of(
        checks.only_scalings("yarn"),
        checks.no_windows,
        checks.only_values(
            first_k_dense_replace=0, norm_head=False, norm_softmax=False, use_qk_norm=False
        ),
    ),
    heads=(LLAMA_CPP,),
)

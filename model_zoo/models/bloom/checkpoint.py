"""BLOOM: conversion of text model checkpoints to GGUF."""

import torch
from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule
from model_zoo.convert.transforms import attention_parts

_PROJECTIONS = (
    ("input_layernorm", "attn_norm"),
    ("self_attention.dense", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.dense_h_to_4h", "ffn_up"),
    ("mlp.dense_4h_to_h", "ffn_down"),
)
_REPLACED = ("feed_forward_length", "rope.dimension_count", "rope.freq_base")


def _joined_by_kind(config: Configuration, rows: Tensor) -> Tensor:
    heads = config.require_size("num_attention_heads")
    return torch.cat(attention_parts(rows, heads, config.head_dim))


CONVERSION = Conversion(
    serves=("BloomForCausalLM",),
    model_types=("bloom",),
    architecture="bloom",
    keys=(
        *(key for key in decoders.layer_normed() if key.name not in _REPLACED),
        Key("feed_forward_length", lambda c: 4 * c.require_size("hidden_size")),
    ),
    rules=(
        Rule("word_embeddings.weight", "token_embd.weight"),
        Rule("word_embeddings_layernorm.*", "token_embd_norm.*"),
        Rule("ln_f.*", "output_norm.*"),
        decoders.EMBEDDINGS[2],
        Rule("h.{n}.self_attention.query_key_value.*", "blk.{n}.attn_qkv.*", _joined_by_kind),
        *(Rule(f"h.{{n}}.{name}.*", f"blk.{{n}}.{target}.*") for name, target in _PROJECTIONS),
    ),
    roots=("transformer.",),
    spellings={
        "hidden_size": "n_embed",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "seq_length",
        "layer_norm_eps": "layer_norm_epsilon",
    },
    # `transformers` has no longest context; the authors trained all models with this one.
    defaults={"tie_word_embeddings": True, "max_position_embeddings": 2048},
    check=checks.only_values(apply_residual_connection_post_layernorm=False),
)

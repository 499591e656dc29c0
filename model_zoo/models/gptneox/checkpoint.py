"""GPT-NeoX: conversion of text model checkpoints to GGUF."""

import torch
from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import FLAVOURS, OUTPUT, Conversion, Key, Rule
from model_zoo.convert.transforms import attention_parts


def _joined_by_kind(config: Configuration, rows: Tensor) -> Tensor:
    heads = config.require_size("num_attention_heads")
    return torch.cat(attention_parts(rows, heads, config.head_dim))


CONVERSION = Conversion(
    serves=("GPTNeoXForCausalLM",),
    model_types=("gpt_neox",),
    architecture="gptneox",
    keys=(
        *decoders.layer_normed(),
        Key("use_parallel_residual", "use_parallel_residual", of=bool),
    ),
    rules=(
        Rule("embed_in.weight", "token_embd.weight"),
        Rule("embed_out.weight", OUTPUT),
        Rule("lm_head.weight", OUTPUT),
        Rule("final_layer_norm.*", "output_norm.*"),
        Rule("layers.{n}.attention.query_key_value.*", "blk.{n}.attn_qkv.*", _joined_by_kind),
        Rule("layers.{n}.attention.dense.*", "blk.{n}.attn_output.*"),
        Rule("layers.{n}.mlp.dense_h_to_4h.*", "blk.{n}.ffn_up.*"),
        Rule("layers.{n}.mlp.dense_4h_to_h.*", "blk.{n}.ffn_down.*"),
        *decoders.BIASED_PRE_NORMS,
    ),
    roots=("gpt_neox.",),
    drop=("layers.{n}.attention.bias", "layers.{n}.attention.masked_bias"),
    spellings={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    defaults={"partial_rotary_factor": 0.25, "use_parallel_residual": True},
    check=checks.all_of(
        checks.only_scalings(), checks.only_values(hidden_act="gelu", attention_bias=True)
    ),
    heads=FLAVOURS,
)

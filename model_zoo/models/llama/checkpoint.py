"""Llama, Mistral, Mixtral, InternLM 2, Baichuan, Refact and XVERSE: conversion of text models to
GGUF."""

from dataclasses import replace

import torch
from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.encoders import GPT2_SPELLINGS
from model_zoo.convert.mapping import FLAVOURS, OUTPUT, Conversion, Key, Rule, Transform
from model_zoo.convert.transforms import attention_parts, first_half, interleaved, second_half
from model_zoo.models.llama.text import BAICHUAN, REFACT
from model_zoo.tokenizers.prefix_space import LARGEST_BAICHUAN_1

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}

_REPLACED_IN_REFACT = (
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "feed_forward_length",
    "rope.dimension_count", "rope.freq_base",
)  # fmt: skip

CONVERSION = Conversion(
    serves=("LlamaForCausalLM", "MistralForCausalLM"),
    model_types=("llama", "mistral"),
    architecture="llama",
    keys=(*decoders.KEYS, *decoders.LINEAR_SCALING, *decoders.YARN_SCALING),
    rules=decoders.llama_rules(rotated=True),
    computed=(decoders.LLAMA3_FACTORS,),
    nested={"llama": _LLAMA, "mistral": _MISTRAL},
    check=checks.only_scalings("linear", "llama3", "yarn"),
)


MIXTRAL = replace(
    CONVERSION,
    serves=("MixtralForCausalLM",),
    model_types=("mixtral",),
    keys=(*CONVERSION.keys, *decoders.EXPERT_COUNTS),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(rotated=True),
        *decoders.experts("block_sparse_moe", names=("w1", "w3", "w2")),
        *decoders.PRE_NORMS,
    ),
    nested={},
)


def _parts(config: Configuration, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return attention_parts(rows, config.require_size("num_key_value_heads"), config.head_dim)


def _queries(config: Configuration, rows: Tensor) -> Tensor:
    return interleaved("num_attention_heads")(config, _parts(config, rows)[0])


def _keys(config: Configuration, rows: Tensor) -> Tensor:
    return interleaved("num_key_value_heads")(config, _parts(config, rows)[1])


def _values(config: Configuration, rows: Tensor) -> Tensor:
    return _parts(config, rows)[2]


# Dynamic scaling changes only positions beyond the stated context, which are not served.
INTERNLM2 = Conversion(
    serves=("InternLM2ForCausalLM",),
    model_types=("internlm2",),
    architecture="internlm2",
    keys=(*decoders.KEYS, *decoders.LINEAR_SCALING),
    rules=(
        Rule("tok_embeddings.weight", "token_embd.weight"),
        Rule("norm.weight", "output_norm.weight"),
        Rule("output.weight", OUTPUT),
        *(
            Rule("layers.{n}.attention.wqkv.weight", f"blk.{{n}}.attn_{name}.weight", transform)
            for name, transform in (("q", _queries), ("k", _keys), ("v", _values))
        ),
        Rule("layers.{n}.attention.wo.weight", "blk.{n}.attn_output.weight"),
        Rule("layers.{n}.feed_forward.w1.weight", "blk.{n}.ffn_gate.weight"),
        Rule("layers.{n}.feed_forward.w3.weight", "blk.{n}.ffn_up.weight"),
        Rule("layers.{n}.feed_forward.w2.weight", "blk.{n}.ffn_down.weight"),
        Rule("layers.{n}.attention_norm.weight", "blk.{n}.attn_norm.weight"),
        Rule("layers.{n}.ffn_norm.weight", "blk.{n}.ffn_norm.weight"),
    ),
    check=checks.all_of(
        checks.only_scalings("linear", "dynamic"), checks.only_values(bias=False, hidden_act="silu")
    ),
    heads=FLAVOURS,
)


def _third(number: int) -> Transform:
    """Rotated queries or keys, or values, of W_pack, which has the rows of all three."""

    def transform(config: Configuration, rows: Tensor) -> Tensor:
        part = rows.chunk(3)[number]
        return part if number == 2 else interleaved("num_attention_heads")(config, part)

    return transform


def _head(config: Configuration, rows: Tensor) -> Tensor:
    """Baichuan 2 computes logits with rows that are divided by their lengths. Baichuan 13B has the
    same settings otherwise."""
    if config.require_size("vocab_size") <= LARGEST_BAICHUAN_1:
        return rows
    return torch.nn.functional.normalize(rows.float())


BAICHUAN_1_AND_2 = Conversion(
    serves=("BaiChuanForCausalLM", "BaichuanForCausalLM"),
    model_types=("baichuan",),
    architecture=BAICHUAN,
    keys=decoders.KEYS,
    rules=(
        *(rule for rule in decoders.EMBEDDINGS if rule.target != OUTPUT),
        Rule("lm_head.weight", OUTPUT, _head),
        *(
            Rule("layers.{n}.self_attn.W_pack.weight", f"blk.{{n}}.attn_{name}.weight", _third(n))
            for n, name in enumerate("qkv")
        ),
        decoders.attention()[3],
        *decoders.feed_forward(),
        *decoders.PRE_NORMS,
    ),
    spellings={"max_position_embeddings": "model_max_length"},
    check=checks.only_scalings(),
)

REFACT_1 = Conversion(
    serves=("GPTRefactForCausalLM",),
    architecture=REFACT,
    keys=(
        *(key for key in decoders.KEYS if key.name not in _REPLACED_IN_REFACT),
        Key("attention.head_count_kv", lambda c: 1),
        # Two thirds of four times the hidden size, rounded up to a multiple of 256.
        Key(
            "feed_forward_length",
            lambda c: -(-(8 * c.require_size("hidden_size") // 3) // 256) * 256,
        ),
        Key("attention.layer_norm_rms_epsilon", "layer_norm_eps", of=float),
    ),
    rules=(
        Rule("wte.weight", "token_embd.weight"),
        Rule("ln_f.weight", "output_norm.weight"),
        Rule("lm_head.weight", OUTPUT),
        Rule("h.{n}.attn.q.weight", "blk.{n}.attn_q.weight"),
        Rule("h.{n}.attn.kv.weight", "blk.{n}.attn_k.weight", first_half),
        Rule("h.{n}.attn.kv.weight", "blk.{n}.attn_v.weight", second_half),
        Rule("h.{n}.attn.c_proj.weight", "blk.{n}.attn_output.weight"),
        Rule("h.{n}.mlp.gate_up_proj.weight", "blk.{n}.ffn_gate.weight", first_half),
        Rule("h.{n}.mlp.gate_up_proj.weight", "blk.{n}.ffn_up.weight", second_half),
        Rule("h.{n}.mlp.c_proj.weight", "blk.{n}.ffn_down.weight"),
        Rule("h.{n}.ln_1.weight", "blk.{n}.attn_norm.weight"),
        Rule("h.{n}.ln_2.weight", "blk.{n}.ffn_norm.weight"),
    ),
    roots=("transformer.",),
    spellings=GPT2_SPELLINGS,
    check=checks.only_values(multi_query=True),
)

XVERSE = replace(
    CONVERSION,
    serves=("XverseForCausalLM",),
    model_types=(),
    architecture="xverse",
    keys=(*decoders.KEYS, *decoders.LINEAR_SCALING),
    computed=(),
    nested={},
    check=checks.only_scalings("linear"),
)

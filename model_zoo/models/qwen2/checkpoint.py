"""Qwen 1 and 2, and openPangu-Embedded: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import OUTPUT, Conversion, Key, Rule
from model_zoo.models.qwen2.text import QWEN_1

CONVERSION = Conversion(
    serves=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    architecture="qwen2",
    keys=(*decoders.KEYS, *decoders.YARN_SCALING),
    rules=decoders.llama_rules(),
    nested={
        "qwen2": {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
        }
    },
    check=checks.all_of(checks.only_scalings("yarn"), checks.no_windows),
)

PANGU = replace(
    CONVERSION,
    serves=("PanguEmbeddedForCausalLM",),
    model_types=(),
    architecture="pangu-embedded",
    keys=decoders.KEYS,
    nested={},
    check=checks.all_of(checks.only_scalings(), checks.only_values(hidden_act="silu")),
)

# The context is that of training: in longer ones, scales depend on the length of each sequence.
FIRST = Conversion(
    serves=("QWenLMHeadModel",),
    architecture=QWEN_1,
    keys=(
        *(key for key in decoders.KEYS if key.name != "context_length"),
        Key("context_length", "seq_length"),
    ),
    rules=(
        Rule("wte.weight", "token_embd.weight"),
        Rule("ln_f.weight", "output_norm.weight"),
        Rule("lm_head.weight", OUTPUT),
        Rule("h.{n}.ln_1.weight", "blk.{n}.attn_norm.weight"),
        Rule("h.{n}.attn.c_attn.*", "blk.{n}.attn_qkv.*"),
        Rule("h.{n}.attn.c_proj.weight", "blk.{n}.attn_output.weight"),
        Rule("h.{n}.ln_2.weight", "blk.{n}.ffn_norm.weight"),
        Rule("h.{n}.mlp.w2.weight", "blk.{n}.ffn_gate.weight"),
        Rule("h.{n}.mlp.w1.weight", "blk.{n}.ffn_up.weight"),
        Rule("h.{n}.mlp.c_proj.weight", "blk.{n}.ffn_down.weight"),
    ),
    roots=("transformer.",),
    spellings={
        "rms_norm_eps": "layer_norm_epsilon",
        "rope_theta": "rotary_emb_base",
        "head_dim": "kv_channels",
    },
    check=checks.only_values(rotary_pct=1.0),
)

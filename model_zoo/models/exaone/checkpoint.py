"""EXAONE 3 and 3.5: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.mapping import Conversion, Rule

_ATTENTION = "h.{n}.attn.attention"

CONVERSION = Conversion(
    serves=("ExaoneForCausalLM",),
    model_types=("exaone",),
    architecture="exaone",
    keys=(*decoders.KEYS, *decoders.YARN_SCALING),
    rules=(
        Rule("wte.weight", "token_embd.weight"),
        Rule("ln_f.weight", "output_norm.weight"),
        decoders.EMBEDDINGS[2],
        Rule(f"{_ATTENTION}.q_proj.weight", "blk.{n}.attn_q.weight"),
        Rule(f"{_ATTENTION}.k_proj.weight", "blk.{n}.attn_k.weight"),
        Rule(f"{_ATTENTION}.v_proj.weight", "blk.{n}.attn_v.weight"),
        Rule(f"{_ATTENTION}.out_proj.weight", "blk.{n}.attn_output.weight"),
        Rule("h.{n}.mlp.c_fc_0.weight", "blk.{n}.ffn_gate.weight"),
        Rule("h.{n}.mlp.c_fc_1.weight", "blk.{n}.ffn_up.weight"),
        Rule("h.{n}.mlp.c_proj.weight", "blk.{n}.ffn_down.weight"),
        Rule("h.{n}.ln_1.weight", "blk.{n}.attn_norm.weight"),
        Rule("h.{n}.ln_2.weight", "blk.{n}.ffn_norm.weight"),
    ),
    computed=(decoders.LLAMA3_FACTORS,),
    roots=("transformer.",),
    drop=("rotary.inv_freq", "h.{n}.attn.attention.rotary.inv_freq"),
    spellings={
        "num_hidden_layers": "num_layers",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
    check=checks.all_of(
        checks.only_scalings("llama3", "yarn"), checks.only_values(hidden_act="silu")
    ),
)

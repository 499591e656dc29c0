"""gpt-oss: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key, Rule, Transform
from model_zoo.convert.transforms import (
    after_transposing,
    even_rows,
    odd_rows,
    repacked_mxfp4,
    unchanged,
)
from model_zoo.models.gptoss.text import FULL_EVERY
from runtime.errors import UnsupportedModelError


def _renamed(source: str, *, llama_cpp: str, ollama: str) -> tuple[Rule, Rule]:
    return (
        Rule(f"layers.{{n}}.{source}", f"blk.{{n}}.{llama_cpp}", flavours=(LLAMA_CPP,)),
        Rule(f"layers.{{n}}.{source}", f"blk.{{n}}.{ollama}", flavours=(OLLAMA,)),
    )


def _experts(name: str, target: str, rows: Transform) -> tuple[Rule, ...]:
    """Rules for a matrix of the experts, stored as numbers [experts, in, out] or as MXFP4 blocks
    [experts, out, …]. Rows of gate and up alternate."""
    source, full = f"layers.{{n}}.mlp.experts.{name}", f"blk.{{n}}.{target}"
    return (
        Rule(source, f"{full}.weight", after_transposing(rows), each=True),
        Rule(
            (f"{source}_blocks", f"{source}_scales"),
            f"{full}.weight",
            lambda config, blocks, scales: rows(config, repacked_mxfp4(config, blocks, scales)),
            each=True,
            blocks="MXFP4",
        ),
        Rule(f"{source}_bias", f"{full}.bias", rows, each=True),
    )


def _untruncated(config: Configuration) -> None:
    if config.rope()["rope_type"] == "yarn" and config.rope().get("truncate", True):
        raise UnsupportedModelError(
            f"{config.path}: its rope parameters must have `truncate` false, which readers of this "
            "architecture's files assume."
        )


CONVERSION = Conversion(
    serves=("GptOssForCausalLM",),
    model_types=("gpt_oss",),
    architecture={LLAMA_CPP: "gpt-oss", OLLAMA: "gptoss"},
    keys=(
        *decoders.KEYS,
        *decoders.YARN_SCALING,
        Key("attention.sliding_window", "sliding_window"),
        *decoders.EXPERT_COUNTS,
        Key("expert_feed_forward_length", "intermediate_size"),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention()[:3],
        *_renamed("self_attn.o_proj.*", llama_cpp="attn_output.*", ollama="attn_out.*"),
        *_renamed("self_attn.sinks", llama_cpp="attn_sinks.weight", ollama="attn_sinks"),
        Rule("layers.{n}.input_layernorm.weight", "blk.{n}.attn_norm.weight"),
        *_renamed(
            "post_attention_layernorm.weight",
            llama_cpp="post_attention_norm.weight",
            ollama="ffn_norm.weight",
        ),
        Rule("layers.{n}.mlp.router.*", "blk.{n}.ffn_gate_inp.*"),
        *_experts("gate_up_proj", "ffn_gate_exps", even_rows),
        *_experts("gate_up_proj", "ffn_up_exps", odd_rows),
        *_experts("down_proj", "ffn_down_exps", unchanged),
    ),
    check=checks.all_of(
        checks.only_scalings("yarn"), checks.every_nth_full(FULL_EVERY), _untruncated
    ),
    heads=(LLAMA_CPP,),
)

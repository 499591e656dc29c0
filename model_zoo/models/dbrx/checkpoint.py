"""DBRX: conversion of text model checkpoints to GGUF."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import OUTPUT, Conversion, Key, Rule
from model_zoo.convert.transforms import transposed
from runtime.errors import UnsupportedModelError

_ATTENTION, _EXPERTS = "attn_config", "ffn_config"
_MIXER = "blocks.{n}.norm_attn_norm"


def _of(part: str, setting: str) -> Callable[[Configuration], Any]:
    """A key's source: a setting of a part of the model."""
    return lambda config: config.of_part(part).require(setting)


def _of_each(config: Configuration, rows: Tensor) -> Tensor:
    """[experts * width, hidden] -> [experts, width, hidden]."""
    return rows.unflatten(0, (config.of_part(_EXPERTS).require_size("moe_num_experts"), -1))


def _downs_of_each(config: Configuration, rows: Tensor) -> Tensor:
    """[experts * width, hidden] -> [experts, hidden, width]."""
    return transposed(config, _of_each(config, rows))


def _as_published(config: Configuration) -> None:
    """Refuses other curves than SiLU, and weights of experts that are not divided by their sum."""
    experts = config.of_part(_EXPERTS)
    curve = dict(experts.get("ffn_act_fn", {})).get("name", "silu")
    # Absent means 1, and null means that the weights are not divided.
    if curve != "silu" or experts.whole.get("moe_normalize_expert_weights", 1) != 1:
        raise UnsupportedModelError(
            f"{config.path}: `{_EXPERTS}` must have `silu` as `ffn_act_fn` and 1 as "
            "`moe_normalize_expert_weights`; files of this architecture mean these."
        )


CONVERSION = Conversion(
    serves=("DbrxForCausalLM",),
    model_types=("dbrx",),
    architecture="dbrx",
    keys=(
        Key("block_count", "num_hidden_layers"),
        Key("context_length", "max_position_embeddings"),
        Key("embedding_length", "hidden_size"),
        Key("feed_forward_length", _of(_EXPERTS, "ffn_hidden_size")),
        Key("attention.head_count", "num_attention_heads"),
        Key("attention.head_count_kv", _of(_ATTENTION, "kv_n_heads")),
        Key("attention.clamp_kqv", _of(_ATTENTION, "clip_qkv"), of=float),
        Key("attention.layer_norm_epsilon", lambda c: 1e-5),  # of all models
        *decoders.HEAD_SIZES,
        decoders.ROTATED_SIZE,
        # `transformers` saves a base outside of `attn_config`, too, which its default may have set.
        Key("rope.freq_base", _of(_ATTENTION, "rope_theta"), of=float),
        Key("expert_count", _of(_EXPERTS, "moe_num_experts")),
        Key("expert_used_count", _of(_EXPERTS, "moe_top_k")),
        Key("vocab_size", "vocab_size"),
    ),
    rules=(
        Rule("wte.weight", "token_embd.weight"),
        Rule("norm_f.weight", "output_norm.weight"),
        Rule("lm_head.weight", OUTPUT),
        Rule(f"{_MIXER}.norm_1.weight", "blk.{n}.attn_norm.weight"),
        Rule(f"{_MIXER}.attn.Wqkv.weight", "blk.{n}.attn_qkv.weight"),
        Rule(f"{_MIXER}.attn.out_proj.weight", "blk.{n}.attn_output.weight"),
        Rule(f"{_MIXER}.norm_2.weight", "blk.{n}.attn_output_norm.weight"),
        Rule("blocks.{n}.ffn.router.layer.weight", "blk.{n}.ffn_gate_inp.weight"),
        *(
            Rule(
                f"blocks.{{n}}.ffn.experts.mlp.{source}",
                f"blk.{{n}}.ffn_{target}_exps.weight",
                transform,
            )
            for source, target, transform in (
                ("w1", "gate", _of_each),
                ("v1", "up", _of_each),
                ("w2", "down", _downs_of_each),
            )
        ),
    ),
    roots=("transformer.",),
    spellings={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    },
    check=checks.all_of(checks.only_scalings(), _as_published),
)

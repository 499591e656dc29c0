"""MPT: conversion of text model checkpoints to GGUF."""

from collections.abc import Mapping
from typing import Any

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule
from runtime.errors import UnsupportedModelError

_ATTENTION = "attn_config"
# Settings of attention that files of this architecture mean.
_USUAL: Mapping[str, Any] = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "qk_ln": False,
    "prefix_lm": False,
    "softmax_scale": None,
}
_PROJECTIONS = (
    ("attn.Wqkv", "attn_qkv"),
    ("attn.out_proj", "attn_output"),
    ("ffn.up_proj", "ffn_up"),
    ("ffn.down_proj", "ffn_down"),
    ("norm_1", "attn_norm"),
    ("norm_2", "ffn_norm"),
)
_REPLACED = (
    "feed_forward_length", "attention.head_count_kv", "rope.dimension_count", "rope.freq_base",
)  # fmt: skip


def _attention(config: Configuration, setting: str, default: Any) -> Any:
    stated = config.get(_ATTENTION, {})
    return dict(stated).get(setting, default)


def _usual(config: Configuration) -> None:
    for setting, usual in _USUAL.items():
        value = _attention(config, setting, usual)
        if value != usual:
            raise UnsupportedModelError(
                f"{config.path}: has {str(value)[:80]!r} as `{setting}` of attention, where files "
                f"of this architecture mean {usual!r}."
            )


CONVERSION = Conversion(
    serves=("MPTForCausalLM", "MptForCausalLM"),
    model_types=("mpt",),
    architecture="mpt",
    keys=(
        *(key for key in decoders.layer_normed() if key.name not in _REPLACED),
        Key("feed_forward_length", lambda c: 4 * c.require_size("hidden_size")),
        Key("attention.clamp_kqv", lambda c: _attention(c, "clip_qkv", None), of=float),
        Key(
            "attention.max_alibi_bias",
            lambda c: _attention(c, "alibi_bias_max", 8),
            of=float,
        ),
    ),
    rules=(
        Rule("wte.weight", "token_embd.weight"),
        Rule("norm_f.*", "output_norm.*"),
        decoders.EMBEDDINGS[2],
        *(Rule(f"blocks.{{n}}.{name}.*", f"blk.{{n}}.{target}.*") for name, target in _PROJECTIONS),
    ),
    roots=("transformer.",),
    spellings={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        "layer_norm_eps": "layer_norm_epsilon",
    },
    defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5},
    check=checks.all_of(_usual, checks.only_values(expansion_ratio=4, logit_scale=None)),
)

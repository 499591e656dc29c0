"""RWKV 7: conversion of the text model checkpoints of flash-linear-attention to GGUF."""

from collections.abc import Callable

import torch
from torch import Tensor

from model_zoo.convert import checks
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import OUTPUT, Conversion, Key, Rule
from model_zoo.convert.recurrent_models import CONTEXT
from model_zoo.convert.transforms import flattened

_LAYER = "layers.{n}"
# By the key of the file: the setting, and an exponent and a factor that determine it otherwise.
_RANKS = {
    "decay": ("decay_low_rank_dim", 0.5, 1.8),
    "iclr": ("a_low_rank_dim", 0.5, 1.8),
    "value_residual_mix": ("v_low_rank_dim", 0.5, 1.3),
    "gate": ("gate_low_rank_dim", 0.8, 0.6),
}
_PROJECTIONS = {"r": "receptance", "k": "key", "v": "value", "o": "output"}


def _rank(name: str) -> Key:
    """The rank of a product of two matrices: as stated, or a multiple of 32 by the hidden size."""
    setting, exponent, factor = _RANKS[name]

    def source(config: Configuration) -> int:
        if config.get(setting) is not None:
            return config.require_size(setting)
        return max(1, round(config.require_size("hidden_size") ** exponent * factor / 32)) * 32

    return Key(f"attention.{name}_lora_rank", source)


def _inner(config: Configuration) -> int:
    if config.get("intermediate_size") is not None:
        return config.require_size("intermediate_size")
    return int(config.require_size("hidden_size") * float(config.get("hidden_ratio", 4.0)))


def _begins(config: Configuration, layer: int) -> bool:
    return layer == 0


def _follows(config: Configuration, layer: int) -> bool:
    return layer > 0


def _fused(config: Configuration, *shares: Tensor) -> Tensor:
    """[hidden], with further dimensions of one element, each -> [mixtures, 1, 1, hidden]."""
    return torch.stack([share.reshape(1, 1, -1) for share in shares])


def _factored(
    source: str, target: str, *, only: Callable[[Configuration, int], bool] | None = None
) -> tuple[Rule, ...]:
    """Rules for a product of two small matrices, which stay in float32, and the bias."""
    parts = (("0.weight", "1"), ("2.weight", "2"), ("2.bias", "0"))
    return tuple(
        Rule(
            f"{_LAYER}.attn.{source}_lora.lora.{part}",
            f"blk.{{n}}.time_mix_{target}{number}.weight",
            only=only,
            keep=True,
        )
        for part, number in parts
    )


CONVERSION = Conversion(
    serves=("RWKV7ForCausalLM",),
    architecture="rwkv7",
    keys=(
        Key("block_count", "num_hidden_layers"),
        Key("context_length", lambda c: CONTEXT),
        Key("embedding_length", "hidden_size"),
        Key("feed_forward_length", _inner),
        Key("attention.head_count", lambda c: 0),  # llama.cpp requires it
        Key("attention.layer_norm_epsilon", "norm_eps", of=float),
        Key("wkv.head_size", "head_dim"),
        Key("vocab_size", "vocab_size"),
        *map(_rank, _RANKS),
    ),
    rules=(
        Rule("embeddings.weight", "token_embd.weight"),
        Rule("layers.0.pre_norm.*", "token_embd_norm.*"),
        Rule("norm.*", "output_norm.*"),
        Rule("lm_head.weight", OUTPUT),
        Rule(f"{_LAYER}.attn_norm.*", "blk.{n}.attn_norm.*"),
        Rule(f"{_LAYER}.ffn_norm.*", "blk.{n}.attn_norm_2.*"),
        Rule(
            tuple(f"{_LAYER}.attn.x_{name}" for name in "rwkvag"),
            "blk.{n}.time_mix_lerp_fused.weight",
            _fused,
            keep=True,
        ),
        *(
            Rule(f"{_LAYER}.attn.{name}_proj.weight", f"blk.{{n}}.time_mix_{target}.weight")
            for name, target in _PROJECTIONS.items()
        ),
        *_factored("w", "w"),
        *_factored("a", "a"),
        *_factored("g", "g")[:2],
        *_factored("v", "v", only=_follows),
        # Readers require them in the first layer, where nothing uses them.
        *_factored("a", "v", only=_begins),
        *(
            Rule(f"{_LAYER}.attn.{name}", f"blk.{{n}}.time_mix_{name}.weight", flattened, keep=True)
            for name in ("k_k", "k_a", "r_k")
        ),
        Rule(f"{_LAYER}.attn.g_norm.*", "blk.{n}.time_mix_ln.*"),
        Rule(f"{_LAYER}.ffn.x_k", "blk.{n}.channel_mix_lerp_k.weight", flattened, keep=True),
        Rule(f"{_LAYER}.ffn.key.weight", "blk.{n}.channel_mix_key.weight"),
        Rule(f"{_LAYER}.ffn.value.weight", "blk.{n}.channel_mix_value.weight"),
    ),
    drop=("layers.0.attn.v_lora.**",),
    defaults={"head_dim": 64, "norm_eps": 1e-5},
    check=checks.only_values(hidden_act="sqrelu", norm_bias=True, norm_first=True),
)

"""Qwen 4 Experimental: conversion of text model checkpoints to GGUF."""

from collections.abc import Callable
from itertools import accumulate
from math import isqrt
from typing import Any

from gguf import GGUFValueType
from torch import Tensor

from model_zoo.convert import checks, delta_nets
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import OUTPUT, Conversion, Key, Rule, Transform
from model_zoo.convert.transforms import plus_one, squeezed
from model_zoo.convert.writer import MetadataField
from model_zoo.models.qwen4exp.text import SECTIONS
from runtime.errors import UnsupportedModelError

_BITS = (1 << 64) - 1
_GAMMA, _FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _mixed(value: int) -> int:
    """A step of SplitMix64; Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators"."""
    value = (value + _GAMMA) & _BITS
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        value = (value ^ (value >> shift)) * factor & _BITS
    return value ^ (value >> 31)


def _multipliers(config: Configuration) -> list[int]:
    """The odd factors of the tokens of an n-gram, which keep products below 2^63."""
    bound = max(1, ((1 << 63) - 1) // config.require_size("vocab_size") // 2)
    seed = config.get("seed")
    states = ((seed + _GAMMA * (n + 1)) & _BITS for n in range(config.require_size("ngram_size")))
    return [2 * (_mixed(state) % bound) + 1 for state in states]


def _heads(config: Configuration) -> int:
    return (config.require_size("ngram_size") - 1) * config.require_size("heads_per_ngram")


def _vocabularies(config: Configuration) -> list[int]:
    """The sizes of the heads' parts of the table: the first primes from the stated base on."""
    primes: list[int] = []
    candidate = config.require_size("ngram_vocab_size_base")
    while len(primes) < _heads(config):
        if candidate > 1 and all(candidate % n for n in range(2, isqrt(candidate) + 1)):
            primes.append(candidate)
        candidate += 1
    return primes


def _offsets(config: Configuration) -> list[int]:
    return [0, *accumulate(_vocabularies(config)[:-1])]


def _end(config: Configuration) -> int:
    stated = config.require("eos_token_id")
    return stated[0] if isinstance(stated, list) else stated


def _of_ngrams(name: str, source: Callable[[Configuration], Any]) -> Key:
    """A key of files with embeddings of n-grams."""
    return Key(name, lambda config: source(config) if config.get("ple_layer_ids") else None)


def _wide(source: Callable[[Configuration], list[int]]) -> Callable[[Configuration], Any]:
    """An array of 64 bit integers, which readers require here."""
    return lambda config: MetadataField(source(config), GGUFValueType.ARRAY, GGUFValueType.UINT64)


def _has_ngrams(config: Configuration, layer: int) -> bool:
    return layer + 1 in (config.get("ple_layer_ids") or ())


def _sized(setting: str) -> Callable[[Configuration], int]:
    return lambda config: config.require_size(setting)


def _of_indexer(*, keys: bool) -> Transform:
    """Separates the indexer's queries from its keys, which follow them."""

    def transform(config: Configuration, rows: Tensor) -> Tensor:
        queries = config.require_size("indexer_n_heads") * config.require_size("indexer_head_dim")
        return rows[queries:] if keys else rows[:queries]

    return transform


def _expressible(config: Configuration) -> None:
    """The gate of delta nets, and at most one layer with n-grams: readers know nothing else."""
    if (config.get("output_gate_type") or config.get("hidden_act", "silu")) != "sigmoid":
        raise UnsupportedModelError(
            f"{config.path}: `output_gate_type` must be `sigmoid`; this architecture's files "
            "cannot express other gates."
        )
    if len(set(config.get("ple_layer_ids") or ())) > 1:
        raise UnsupportedModelError(
            f"{config.path}: `ple_layer_ids` names several layers; this architecture's files have "
            "one table of n-grams."
        )


def _connection(source: str, target: str, *, injects: bool = True) -> tuple[Rule, ...]:
    names = {"input_mix_weight_down": "down", "input_mix_weight_up": "up"}
    names |= {"block_inject_weight": "inject"} if injects else {}
    return (
        Rule(f"{source}.hc_norm.weight", f"{target}_norm.weight", plus_one),
        *(Rule(f"{source}.{old}.weight", f"{target}_{new}.weight") for old, new in names.items()),
    )


def _ngram(source: str, target: str, transform: Transform | None = None, **how: Any) -> Rule:
    name = f"blk.{{n}}.ple_{target}.weight"
    return Rule(f"layers.{{n}}.ple.{source}.weight", name, transform, only=_has_ngrams, **how)


def _indexer(source: str, target: str, transform: Transform) -> Rule:
    name = f"blk.{{n}}.indexer.{target}.weight"
    stored = f"layers.{{n}}.self_attn.indexer.{source}.weight"
    return Rule(stored, name, transform, only=delta_nets.attends)


CONVERSION = Conversion(
    serves=("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
    model_types=("qwen4_exp_text",),
    architecture="qwen4exp",
    keys=(
        *delta_nets.KEYS,
        *delta_nets.EXPERT_KEYS,
        delta_nets.sections_key(SECTIONS),
        Key("hyper_connection.count", "hc_count"),
        Key("hyper_connection.low_rank", "hc_lowrank"),
        Key("attention.indexer.head_count", "indexer_n_heads"),
        Key("attention.indexer.key_length", "indexer_head_dim"),
        Key("attention.indexer.top_k", "indexer_budget"),
        Key(
            "attention.compress_ratios",
            lambda c: [
                delta_nets.attends(c, n) * c.require_size("indexer_compress_ratio")
                for n in range(c.layers)
            ],
        ),
        _of_ngrams("ple.layers", lambda c: [layer - 1 for layer in c.require("ple_layer_ids")]),
        _of_ngrams("ple.ngram_size", _sized("ngram_size")),
        _of_ngrams("ple.heads_per_ngram", _sized("heads_per_ngram")),
        _of_ngrams("ple.conv_kernel", _sized("ple_conv_kernel_size")),
        _of_ngrams("ple.eos_token_id", _end),
        _of_ngrams("ple.image_token_id", lambda c: c.get("image_token_id")),
        _of_ngrams("ple.layer_multipliers", _wide(_multipliers)),
        _of_ngrams("ple.head_vocab_sizes", _wide(_vocabularies)),
        _of_ngrams("ple.head_offsets", _wide(_offsets)),
        _of_ngrams(
            "embedding_length_per_layer_input",
            lambda c: (c.get("ple_embed_dim") or c.require_size("hidden_size")) // _heads(c),
        ),
    ),
    rules=(
        Rule("embed_tokens.weight", "token_embd.weight"),
        Rule("lm_head.weight", OUTPUT),
        *_connection("hyper_connection_mixer", "output_hc", injects=False),
        Rule(
            "layers.{n}.ple.ple_embedding.ngram_embedding.shard_{e}.weight",
            "per_layer_token_embd.weight",
            parts=True,
            optional=True,
        ),
        *_connection("layers.{n}.attn_hyper_connection", "blk.{n}.hc_attn"),
        *_connection("layers.{n}.mlp_hyper_connection", "blk.{n}.hc_ffn"),
        *delta_nets.ATTENTION,
        _indexer("index_qk_proj", "q_proj", _of_indexer(keys=False)),
        _indexer("index_qk_proj", "k_proj", _of_indexer(keys=True)),
        _indexer("q_layernorm", "q_norm", plus_one),
        _indexer("k_layernorm", "k_norm", plus_one),
        *delta_nets.TILED_RULES,
        *delta_nets.EXPERT_RULES,
        _ngram("key_proj", "key"),
        _ngram("value_proj", "value"),
        _ngram("norm_key", "norm_key", plus_one),
        _ngram("norm_query", "norm_query", plus_one),
        _ngram("norm_conv", "norm_conv", plus_one),
        _ngram("conv1d", "conv1d", squeezed, keep=True),
    ),
    drop=(
        *delta_nets.DROPPED,
        # Numbers that follow from the settings.
        "layers.{n}.ple.ple_embedding.layer_multipliers",
        "layers.{n}.ple.ple_embedding.ngram_heads_vocab_sizes",
        "layers.{n}.ple.ple_embedding.ngram_heads_offsets",
    ),
    defaults={
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "hc_count": 4,
        "hc_lowrank": 320,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
        "ple_conv_kernel_size": 4,
        "seed": 1234,
    },
    check=checks.all_of(checks.only_scalings("yarn"), delta_nets.even_intervals, _expressible),
)

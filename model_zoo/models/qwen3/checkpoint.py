"""Qwen 3, its rerankers and OpenELM: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, decoders
from model_zoo.convert.answering_rerankers import TASK, reranker_keys, reranker_rules
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.encoders import check_one_score
from model_zoo.convert.mapping import Conversion, Key, Rule
from model_zoo.convert.transforms import first_half, second_half
from model_zoo.tokenizers.pairs import TEMPLATE_KEY

_RERANKER = "qwen3-reranker"
# The prompt that the authors of Qwen's rerankers publish.
_PAIR = (
    f"{TASK}<Instruct>: Given a web search query, retrieve relevant passages that answer the query"
    "\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_OF_LAYERS = (
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "feed_forward_length",
)  # fmt: skip
_LAYERS = (
    *decoders.attention(),
    *decoders.feed_forward(),
    *decoders.PRE_NORMS,
    *decoders.HEAD_NORMS,
)
CONVERSION = Conversion(
    serves=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    architecture="qwen3",
    keys=reranker_keys(_RERANKER, _PAIR, (*decoders.KEYS, *decoders.YARN_SCALING)),
    rules=(*reranker_rules(_RERANKER), *_LAYERS),
    nested={
        "qwen3": {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
        }
    },
    check=checks.all_of(checks.only_scalings("yarn"), checks.no_windows),
)

# The same rerankers with one row, the difference of the answers, instead of a head.
RANKING = replace(
    CONVERSION,
    serves=("Qwen3ForSequenceClassification",),
    model_types=(),
    keys=(*decoders.KEYS, *decoders.YARN_SCALING, Key(TEMPLATE_KEY, lambda c: _PAIR)),
    rules=(
        *decoders.EMBEDDINGS[:2],
        *_LAYERS,
        Rule("score.weight", "cls.output.weight"),
    ),
    check=checks.all_of(checks.only_scalings("yarn"), checks.no_windows, check_one_score),
)


def _widths(config: Configuration) -> list[int]:
    """Multiples of the hidden size, rounded to multiples of a divisor."""
    hidden, divisor = config.require_size("hidden_size"), config.require_size("ffn_dim_divisor")
    widths = []
    for multiplier in config.require("ffn_multipliers"):
        exact = multiplier * hidden
        width = max(divisor, int(exact + divisor / 2) // divisor * divisor)
        widths.append(width + divisor if width < 0.9 * exact else width)
    return widths


OPENELM = Conversion(
    serves=("OpenELMForCausalLM",),
    architecture="openelm",
    keys=(
        *(key for key in decoders.KEYS if key.name not in _OF_LAYERS),
        Key("attention.head_count", "num_query_heads"),
        Key("attention.head_count_kv", "num_kv_heads"),
        Key("feed_forward_length", _widths),
        Key("attention.layer_norm_rms_epsilon", lambda c: 1e-6),  # of all models
    ),
    rules=(
        Rule("token_embeddings.weight", "token_embd.weight"),
        Rule("norm.weight", "output_norm.weight"),
        Rule("layers.{n}.attn_norm.weight", "blk.{n}.attn_norm.weight"),
        Rule("layers.{n}.attn.qkv_proj.weight", "blk.{n}.attn_qkv.weight"),
        Rule("layers.{n}.attn.q_norm.weight", "blk.{n}.attn_q_norm.weight"),
        Rule("layers.{n}.attn.k_norm.weight", "blk.{n}.attn_k_norm.weight"),
        Rule("layers.{n}.attn.out_proj.weight", "blk.{n}.attn_output.weight"),
        Rule("layers.{n}.ffn_norm.weight", "blk.{n}.ffn_norm.weight"),
        Rule("layers.{n}.ffn.proj_1.weight", "blk.{n}.ffn_gate.weight", first_half),
        Rule("layers.{n}.ffn.proj_1.weight", "blk.{n}.ffn_up.weight", second_half),
        Rule("layers.{n}.ffn.proj_2.weight", "blk.{n}.ffn_down.weight"),
    ),
    roots=("transformer.",),
    spellings={
        "num_hidden_layers": "num_transformer_layers",
        "max_position_embeddings": "max_context_length",
        "hidden_size": "model_dim",
        "rope_theta": "rope_freq_constant",
    },
    check=checks.only_values(
        share_input_output_layers=True,
        normalize_qk_projections=True,
        ffn_with_glu=True,
        activation_fn_name="swish",
    ),
)

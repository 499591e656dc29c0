"""GPT-2 and StarCoder: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.encoders import GPT2_SPELLINGS
from model_zoo.convert.mapping import Conversion, Key, Rule
from model_zoo.convert.transforms import transposed

_PROJECTIONS = (
    ("attn.c_attn", "attn_qkv"),
    ("attn.c_proj", "attn_output"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
)
_OTHERS = (
    Rule("wte.weight", "token_embd.weight"),
    Rule("wpe.weight", "position_embd.weight"),
    Rule("ln_f.*", "output_norm.*"),
    decoders.EMBEDDINGS[2],
    Rule("h.{n}.ln_1.*", "blk.{n}.attn_norm.*"),
    Rule("h.{n}.ln_2.*", "blk.{n}.ffn_norm.*"),
)
_REPLACED = (
    "feed_forward_length", "attention.head_count_kv", "rope.dimension_count", "rope.freq_base",
)  # fmt: skip
_KEYS = (
    *(key for key in decoders.layer_normed() if key.name not in _REPLACED),
    Key(
        "feed_forward_length",
        lambda c: c.get("intermediate_size") or 4 * c.require_size("hidden_size"),
    ),
)


def _known_activation(config: Configuration) -> None:
    """Files do not state whether GELU is exact, as in StarCoder, or approximated. The difference is
    at most 0.0005; readers compute one of them for all models."""
    exact = config.get("activation_function") == "gelu"
    checks.only_values(activation_function="gelu" if exact else "gelu_pytorch_tanh")(config)


STARCODER = Conversion(
    serves=("GPTBigCodeForCausalLM",),
    model_types=("gpt_bigcode",),
    architecture="starcoder",
    keys=(*_KEYS, Key("attention.head_count_kv", lambda c: 1)),
    rules=(
        *_OTHERS,
        *(Rule(f"h.{{n}}.{name}.*", f"blk.{{n}}.{target}.*") for name, target in _PROJECTIONS),
    ),
    roots=("transformer.",),
    drop=("h.{n}.attn.bias", "h.{n}.attn.masked_bias"),
    spellings=GPT2_SPELLINGS,
    defaults={
        "tie_word_embeddings": True,
        "layer_norm_eps": 1e-5,
        "activation_function": "gelu_pytorch_tanh",
    },
    check=checks.all_of(
        checks.only_values(multi_query=True, scale_attn_weights=True), _known_activation
    ),
)

CONVERSION = replace(
    STARCODER,
    serves=("GPT2LMHeadModel",),
    model_types=("gpt2",),
    architecture="gpt2",
    keys=(*_KEYS, Key("attention.head_count_kv", "num_attention_heads")),
    rules=(
        *_OTHERS,
        *(
            rule
            for name, target in _PROJECTIONS
            for rule in (
                Rule(f"h.{{n}}.{name}.weight", f"blk.{{n}}.{target}.weight", transposed),
                Rule(f"h.{{n}}.{name}.bias", f"blk.{{n}}.{target}.bias"),
            )
        ),
    ),
    defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5},
    check=checks.only_values(
        activation_function="gelu_new",
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    ),
)

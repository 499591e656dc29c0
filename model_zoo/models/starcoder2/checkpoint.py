"""StarCoder 2 and CodeShell: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.encoders import GPT2_SPELLINGS
from model_zoo.convert.mapping import OUTPUT, Conversion, Key, Rule
from model_zoo.models.starcoder2.text import CODESHELL

_REPLACED_IN_CODESHELL = ("attention.head_count_kv", "feed_forward_length")

CONVERSION = Conversion(
    serves=("Starcoder2ForCausalLM",),
    model_types=("starcoder2",),
    architecture="starcoder2",
    keys=(
        *decoders.layer_normed("norm_epsilon"),
        Key("attention.sliding_window", "sliding_window", optional=True),
    ),
    rules=(
        *decoders.EMBEDDINGS_AND_BIASED_NORM,
        *decoders.attention(),
        Rule("layers.{n}.mlp.c_fc.*", "blk.{n}.ffn_up.*"),
        Rule("layers.{n}.mlp.c_proj.*", "blk.{n}.ffn_down.*"),
        *decoders.BIASED_PRE_NORMS,
    ),
    defaults={"tie_word_embeddings": True, "norm_epsilon": 1e-5},
    check=checks.all_of(
        checks.only_scalings(), checks.only_values(use_bias=True, hidden_act="gelu_pytorch_tanh")
    ),
)

_PROJECTIONS = (
    ("attn.c_attn", "attn_qkv"),
    ("attn.c_proj", "attn_output"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
    ("ln_1", "attn_norm"),
    ("ln_2", "ffn_norm"),
)

CODESHELL_7B = Conversion(
    serves=("CodeShellForCausalLM",),
    architecture=CODESHELL,
    keys=(
        *(key for key in decoders.layer_normed() if key.name not in _REPLACED_IN_CODESHELL),
        Key("attention.head_count_kv", "num_query_groups"),
        Key(
            "feed_forward_length",
            lambda c: c.get("intermediate_size") or 4 * c.require_size("hidden_size"),
        ),
    ),
    rules=(
        Rule("wte.weight", "token_embd.weight", optional=True),
        Rule("ln_f.*", "output_norm.*"),
        Rule("lm_head.weight", OUTPUT),
        *(Rule(f"h.{{n}}.{name}.*", f"blk.{{n}}.{target}.*") for name, target in _PROJECTIONS),
    ),
    roots=("transformer.",),
    drop=("h.{n}.attn.bias", "h.{n}.attn.rotary_emb.inv_freq"),
    spellings=GPT2_SPELLINGS,
    check=checks.all_of(
        checks.only_scalings(),
        checks.only_values(
            activation_function="gelu_pytorch_tanh",
            group_query_attention=True,
            position_embedding_type="rope",
        ),
    ),
)

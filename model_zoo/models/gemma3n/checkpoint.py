"""Gemma 3n: conversion of text model checkpoints to GGUF."""

from dataclasses import replace

import torch
from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key, Rule
from model_zoo.models.gemma3n.text import FULL_EVERY


def _windows(config: Configuration) -> list[bool]:
    return decoders.windows(config, every=FULL_EVERY)


def _stores(config: Configuration, layer: int) -> bool:
    """Whether the layer has its own keys and values."""
    return layer < config.layers - int(config.require("num_kv_shared_layers"))


def _sparsity_bounds(config: Configuration) -> list[float]:
    """One bound per layer, in standard deviations above the mean, below which the stated share of
    gates lies."""
    shares = config.get("activation_sparsity_pattern")
    if shares is None:
        sparse = 10 if config.layers > 10 else 0
        shares = [0.95] * sparse + [0.0] * (config.layers - sparse)
    listed = shares if isinstance(shares, list) else [shares] * config.layers
    normal = torch.distributions.Normal(0, 1)
    return [normal.icdf(torch.tensor(float(share))).item() for share in listed]


def _filled_up(config: Configuration, table: Tensor) -> Tensor:
    """A row for each token of the vocabulary; tokens beyond the table have its first row."""
    missing = config.require_size("vocab_size") - table.shape[0]
    return torch.cat([table, table[:1].expand(missing, -1)]) if missing > 0 else table


def _layer_rule(source: str, target: str) -> Rule:
    return Rule(f"layers.{{n}}.{source}", f"blk.{{n}}.{target}.weight")


def _kept_rules(source: str, target: str) -> tuple[Rule, Rule]:
    """Keeps unused projections of layers that share keys, since llama.cpp requires them."""
    rule = _layer_rule(f"{source}.weight", target)
    unused = replace(rule, only=lambda config, layer: not _stores(config, layer), optional=True)
    return replace(rule, only=_stores), unused


_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}


_STORING_TENSORS = {
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.k_norm": "attn_k_norm",
}


CONVERSION = Conversion(
    serves=("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    architecture="gemma3n",
    keys=(
        *decoders.SIZES,
        *decoders.HEAD_SIZES,
        Key("head_dim", lambda c: c.head_dim, flavours=(OLLAMA,)),
        Key("attention.sliding_window", "sliding_window"),
        Key("attention.sliding_window_pattern", _windows),
        Key("attention.shared_kv_layers", "num_kv_shared_layers"),
        Key("rope.freq_base", decoders.rope_base),
        Key("rope.freq_base_swa", decoders.local_rope_base, flavours=(LLAMA_CPP,)),
        Key("rope.freq_base_local", decoders.local_rope_base, flavours=(OLLAMA,)),
        *decoders.LINEAR_SCALING,
        Key("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
        Key("activation_sparsity_scale", _sparsity_bounds),
        Key("altup.active_idx", "altup_active_idx"),
        Key("altup.num_inputs", "altup_num_inputs"),
        Key("altup.correct_scale", "altup_correct_scale", of=bool),
        Key("final_logit_softcapping", "final_logit_softcapping", of=float),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        Rule("embed_tokens_per_layer.weight", "per_layer_token_embd.weight", _filled_up),
        Rule("per_layer_model_projection.weight", "per_layer_model_proj.weight"),
        Rule("per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
        Rule("altup_projections.{e}.weight", "altup_proj.weight"),
        Rule("altup_unembed_projections.{e}.weight", "altup_unembd_proj.weight"),
        *(_layer_rule(f"{source}.weight", name) for source, name in _LAYER_TENSORS.items()),
        *(rule for names in _STORING_TENSORS.items() for rule in _kept_rules(*names)),
        _layer_rule("altup.correct_output_scale", "altup_correct_scale"),
        *decoders.feed_forward(),
    ),
    drop=decoders.OTHER_PARTS,
    defaults={
        "vocab_size": 262400,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 15,
        "altup_active_idx": 0,
        "altup_num_inputs": 4,
        "altup_correct_scale": True,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    check=checks.only_scalings("linear"),
)

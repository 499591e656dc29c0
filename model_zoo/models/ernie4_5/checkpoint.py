"""ERNIE 4.5: conversion of text model checkpoints to GGUF."""

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule
from model_zoo.convert.transforms import flattened
from runtime.errors import UnsupportedModelError


def _has_experts(config: Configuration, layer: int) -> bool:
    interval = config.require_size("moe_layer_interval")
    return bool(layer >= config.require("moe_layer_start_index")) and (layer + 1) % interval == 0


def _is_dense(config: Configuration, layer: int) -> bool:
    return not _has_experts(config, layer)


def _shares(config: Configuration, layer: int) -> bool:
    return _has_experts(config, layer) and config.require("moe_num_shared_experts") > 0


def _shared_width(config: Configuration) -> int | None:
    shared = int(config.require("moe_num_shared_experts"))
    return shared * config.require_size("moe_intermediate_size") if shared else None


def _experts_up_to_the_last_layer(config: Configuration) -> None:
    end = config.require("moe_layer_end_index")
    if end != -1 and end < config.layers - 1:
        raise UnsupportedModelError(
            f"{config.path}: layers after `moe_layer_end_index` have no experts, which files of "
            "this architecture cannot express."
        )


DEFAULTS = {"tie_word_embeddings": True, "rope_theta": 500_000.0}


CONVERSION = Conversion(
    serves=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    model_types=("ernie4_5",),
    architecture="ernie4_5",
    keys=decoders.KEYS,
    rules=decoders.llama_rules(),
    defaults=DEFAULTS,
    check=checks.only_scalings(),
)


MOE = Conversion(
    serves=("Ernie4_5_MoeForCausalLM",),
    model_types=("ernie4_5_moe",),
    architecture="ernie4_5-moe",
    keys=(
        *decoders.KEYS,
        Key("expert_count", "moe_num_experts"),
        Key("expert_used_count", "moe_k"),
        Key("interleave_moe_layer_step", "moe_layer_interval"),
        Key("leading_dense_block_count", "moe_layer_start_index"),
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("expert_shared_count", "moe_num_shared_experts"),
        Key("expert_shared_feed_forward_length", _shared_width),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention(),
        *decoders.feed_forward(only=_is_dense),
        *decoders.experts(only=_has_experts),
        *decoders.shared_experts(only=_shares),
        Rule(
            "layers.{n}.mlp.moe_statics.e_score_correction_bias",
            "blk.{n}.exp_probs_b.bias",
            flattened,
            only=_has_experts,
        ),
        *decoders.PRE_NORMS,
    ),
    drop=(
        "mtp_block.**",
        "mtp_emb_norm.**",
        "mtp_hidden_norm.**",
        "mtp_linear_proj.**",
    ),
    defaults={
        **DEFAULTS,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_num_shared_experts": 2,
    },
    check=checks.all_of(checks.only_scalings(), _experts_up_to_the_last_layer),
)

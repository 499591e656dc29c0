"""DeepSeek V2 and V3, GLM-4.7-Flash and Mistral Small 4: conversion of checkpoints to GGUF."""

from dataclasses import replace

from gguf import ExpertGatingFuncType

from model_zoo.convert import checks, decoders, latent_rules
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key
from model_zoo.models.deepseek2.text import TEMPERATURE, TEMPERATURE_SPAN
from runtime.errors import UnsupportedModelError


def _log_multiplier(config: Configuration) -> float | None:
    """A tenth of the multiplier, as llama.cpp's converter writes it for this architecture."""
    stated = decoders.yarn_number(config, "mscale_all_dim")
    return stated / 10 if stated else None


def _temperature(config: Configuration) -> float:
    """0 for none, because a file that states nothing has the published model's."""
    return decoders.yarn_number(config, "llama_4_scaling_beta") or 0.0


def _equal_magnitudes(config: Configuration) -> None:
    one, other = (decoders.yarn_number(config, key) for key in ("mscale", "mscale_all_dim"))
    if other and (1.0 if one is None else one) != other:
        raise UnsupportedModelError(
            f"{config.path}: `mscale` is {one} and `mscale_all_dim` {other}; files of this "
            "architecture state one value for both."
        )


def _greedy_or_by_groups(config: Configuration) -> None:
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(
            f"{config.path}: the `topk_method` {method} is not supported for this architecture; "
            "supported are greedy and group_limited_greedy."
        )


def _groups(key: str, config: Configuration) -> int | None:
    return None if config.get("topk_method", "greedy") == "greedy" else config.get(key)


_KEYS = (
    *(key for key in decoders.SIZES if key.name != "attention.head_count_kv"),
    Key("attention.head_count_kv", lambda c: 1, flavours=(LLAMA_CPP,)),
    Key("attention.head_count_kv", "num_attention_heads", flavours=(OLLAMA,)),
    *latent_rules.SIZES,
    Key("attention.key_length", latent_rules.query_size, flavours=(OLLAMA,)),
    Key("attention.value_length", "v_head_dim", flavours=(OLLAMA,)),
    decoders.ROPE_BASE,
    *decoders.YARN_SCALING,
    Key("rope.scaling.yarn_log_multiplier", _log_multiplier),
    *decoders.LEADING_DENSE_KEYS,
)

CONVERSION = Conversion(
    serves=("DeepseekV2ForCausalLM",),
    model_types=("deepseek_v2",),
    architecture="deepseek2",
    keys=(
        *_KEYS,
        Key("expert_gating_func", lambda c: ExpertGatingFuncType.SOFTMAX.value),
        Key("expert_group_count", lambda c: _groups("n_group", c)),
        Key("expert_group_used_count", lambda c: _groups("topk_group", c)),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.PRE_NORMS,
        *latent_rules.projections(),
        *latent_rules.head_matrices(),
        *decoders.LEADING_DENSE,
    ),
    defaults={"first_k_dense_replace": 0},
    check=checks.all_of(checks.only_scalings("yarn"), _equal_magnitudes, _greedy_or_by_groups),
)

V3 = replace(
    CONVERSION,
    serves=("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3",),
    keys=(*_KEYS, *decoders.SIGMOID_KEYS),
    rules=(*CONVERSION.rules, decoders.EXPERT_BIAS),
    check=checks.all_of(
        checks.only_scalings("yarn"), _equal_magnitudes, checks.only_values(rope_interleave=True)
    ),
)

GLM_FLASH = replace(
    V3,
    serves=("Glm4MoeLiteForCausalLM",),
    model_types=("glm4_moe_lite",),
    defaults={"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
)

MISTRAL4 = replace(
    CONVERSION,
    serves=("Mistral4ForCausalLM",),
    model_types=("mistral4",),
    architecture="mistral4",
    keys=(
        *_KEYS,
        Key("expert_gating_func", lambda c: ExpertGatingFuncType.SOFTMAX.value),
        Key("expert_weights_norm", "norm_topk_prob", of=bool),
        Key(TEMPERATURE, _temperature),
        Key(TEMPERATURE_SPAN, decoders.original_context),
    ),
    rules=(*CONVERSION.rules, *decoders.stacked_experts(only=decoders.follows)),
    check=checks.all_of(
        checks.only_scalings("yarn"),
        _equal_magnitudes,
        checks.only_values(n_group=1, rope_interleave=True),
    ),
)

"""DeepSeek V2 to V3.2, GLM-4.7-Flash, GLM-5, Mistral Small 4 and Youtu: conversion of checkpoints
to GGUF."""

from dataclasses import replace

from gguf import ExpertGatingFuncType

from model_zoo.convert import checks, decoders, latent_rules
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key, Rule
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


def _indexed_layers(config: Configuration) -> list[bool]:
    """For each layer whether it has an indexer; others use the choice of the last one before them.
    As listed, as letters (F for one), or from a layer on every n-th, as in GlmMoeDsaConfig."""
    listed, letters = config.get("indexer_types"), config.get("index_topk_pattern")
    if listed is not None or letters is not None:
        kinds = list(listed if listed is not None else letters)
        if len(kinds) != config.layers:
            raise config.error(f"has {config.layers} layers, and the indexers of {len(kinds)}")
        return [kind in ("full", "F") for kind in kinds]
    every, offset = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
    return [max(n - offset + 1, 0) % max(every, 1) == 0 for n in range(config.layers)]


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

_INDEXER_KEYS = (
    Key("attention.indexer.head_count", "index_n_heads"),
    Key("attention.indexer.key_length", "index_head_dim"),
    Key("attention.indexer.top_k", "index_topk"),
)
# Layers without one share that of a layer before them.
_INDEXER = tuple(
    Rule(
        f"layers.{{n}}.self_attn.indexer.{source}",
        f"blk.{{n}}.indexer.{target}",
        optional=True,
        keep=source == "weights_proj.weight",
    )
    for source, target in (
        ("wq_b.weight", "attn_q_b.weight"),
        ("wk.weight", "attn_k.weight"),
        ("k_norm.*", "k_norm.*"),
        ("weights_proj.weight", "proj.weight"),
    )
)

V32 = replace(
    V3,
    serves=("DeepseekV32ForCausalLM",),
    model_types=("deepseek_v32",),
    architecture={LLAMA_CPP: "deepseek32"},
    keys=(*V3.keys, *_INDEXER_KEYS),
    rules=(*V3.rules, *_INDEXER),
)

GLM5 = replace(
    V32,
    serves=("GlmMoeDsaForCausalLM",),
    model_types=("glm_moe_dsa",),
    architecture={LLAMA_CPP: "glm-dsa"},
    keys=(*V32.keys, Key("attention.indexer.types", _indexed_layers)),
    defaults={"first_k_dense_replace": 3, "n_group": 1, "topk_group": 1},
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

# All layers are dense; llama.cpp requires the keys of experts.
YOUTU = replace(
    CONVERSION,
    serves=("YoutuForCausalLM",),
    model_types=("youtu",),
    keys=(
        *(key for key in _KEYS if key not in decoders.LEADING_DENSE_KEYS),
        Key("leading_dense_block_count", lambda c: c.layers),
        Key("expert_shared_count", lambda c: 0),
        Key("expert_feed_forward_length", "intermediate_size"),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.PRE_NORMS,
        *latent_rules.projections(),
        *latent_rules.head_matrices(),
        *decoders.feed_forward(),
    ),
    defaults={},
    check=V3.check,
)

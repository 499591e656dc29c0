"""MiMo-V2: conversion of text model checkpoints to GGUF."""

from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.convert.transforms import Rows
from model_zoo.models.mimo2.text import NEAR_BASE, VALUE_SCALE


def _sliding(config: Configuration) -> list[bool]:
    """Whether each layer has a window: as listed in words or, in published checkpoints, numbers."""
    listed = config.layer_types()
    if listed is not None:
        return [kind == "sliding_attention" for kind in listed]
    pattern = config.require("hybrid_layer_pattern")
    if len(pattern) != config.layers:
        raise config.error(f"has {config.layers} layers, and the kinds of {len(pattern)}")
    return [bool(number) for number in pattern]


def _key_heads(config: Configuration) -> list[int]:
    far = config.require_size("num_key_value_heads")
    near = config.get("swa_num_key_value_heads", 2 * far)
    return [near if slides else far for slides in _sliding(config)]


def _window(config: Configuration) -> int:
    """The tokens that a token sees, itself included, which `sliding_window_size` leaves out."""
    if config.get("sliding_window_size") is not None:
        return config.require_size("sliding_window_size") + 1
    return config.require_size("sliding_window")


def _near_base(config: Configuration) -> float:
    stated = config.get("swa_rope_theta")
    return decoders.rope_base(config, "sliding_attention") if stated is None else float(stated)


def _has_experts(config: Configuration, layer: int) -> bool:
    words, numbers = config.get("mlp_layer_types"), config.get("moe_layer_freq")
    return words[layer] == "sparse" if words is not None else bool(numbers[layer])


def _is_dense(config: Configuration, layer: int) -> bool:
    return not _has_experts(config, layer)


def _slides(config: Configuration, layer: int) -> bool:
    return _sliding(config)[layer]


def _joined(part: int) -> Rows:
    """The rows of queries, keys or values (0, 1 or 2) in a joined matrix. It consists of as many
    parts as layers without a window have key heads, each with queries, keys and values."""

    def rows(config: Configuration, joined: Tensor) -> Tensor:
        parts, values = (
            config.require_size("num_key_value_heads"),
            config.require_size("v_head_dim"),
        )
        queries = config.require_size("num_attention_heads") * config.head_dim
        key_heads = (len(joined) - queries) // (config.head_dim + values)
        sizes = (queries, key_heads * config.head_dim, key_heads * values)
        own = joined.unflatten(0, (parts, -1)).split([size // parts for size in sizes], dim=1)
        return own[part].flatten(0, 1)

    return Rows(rows)


CONVERSION = Conversion(
    serves=("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
    model_types=("mimo_v2_flash", "mimo_v2"),
    architecture="mimo2",
    keys=(
        *(key for key in decoders.SIZES if key.name != "attention.head_count_kv"),
        Key("attention.head_count_kv", _key_heads),
        Key("attention.key_length", lambda c: c.head_dim),
        Key("attention.value_length", "v_head_dim"),
        Key("attention.sliding_window", _window),
        Key("attention.sliding_window_pattern", _sliding),
        Key(VALUE_SCALE, lambda c: float(c.get("attention_value_scale", 1.0))),
        decoders.ROTATED_SIZE,
        decoders.ROPE_BASE,
        Key(NEAR_BASE, _near_base),
        *(
            key
            for key in decoders.LEADING_DENSE_KEYS
            if key.name not in ("leading_dense_block_count", "expert_shared_count")
        ),
        *decoders.SIGMOID_KEYS,
    ),
    rules=(
        *decoders.EMBEDDINGS,
        *decoders.attention()[:3],
        *(
            Rule(
                "layers.{n}.self_attn.qkv_proj.*",
                f"blk.{{n}}.attn_{name}.*",
                _joined(part),
                optional=True,
            )
            for part, name in enumerate("qkv")
        ),
        *decoders.attention()[3:],
        Rule("layers.{n}.self_attn.attention_sink_bias", "blk.{n}.attn_sinks.weight", only=_slides),
        *decoders.feed_forward(only=_is_dense),
        *decoders.experts(only=_has_experts),
        Rule(
            "layers.{n}.mlp.gate.e_score_correction_bias",
            "blk.{n}.exp_probs_b.bias",
            only=_has_experts,
        ),
        *decoders.PRE_NORMS,
    ),
    drop=("mtp.**", "visual.**", "audio_encoder.**", "speech_embeddings.**"),
    defaults={
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    spellings={"rms_norm_eps": "layernorm_epsilon"},
    check=checks.all_of(
        checks.only_scalings(),
        checks.only_values(
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            add_swa_attention_sink_bias=True,
            add_full_attention_sink_bias=False,
        ),
    ),
    heads=(LLAMA_CPP,),
)

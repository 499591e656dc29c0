"""Parts of conversion tables that most decoders share."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from gguf import ExpertGatingFuncType
from torch import Tensor

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OUTPUT, Computed, Key, Rule, Transform
from model_zoo.convert.sentence_transformer import POOLING
from model_zoo.convert.transforms import first_half, flattened, interleaved, plus_one, second_half

# Tensors of vision and audio models, which tables of text models ignore.
OTHER_PARTS = (
    "vision_tower.**",
    "vision_model.**",
    "vision_encoder.**",
    "vision_projection.**",
    "visual.**",
    "multi_modal_projector.**",
    "audio_tower.**",
    "embed_vision.**",
    "embed_audio.**",
)

# Sizes of both decoders and encoders.
SHARED_SIZES = (
    Key("block_count", "num_hidden_layers"),
    Key("context_length", "max_position_embeddings"),
    Key("embedding_length", "hidden_size"),
    Key("feed_forward_length", "intermediate_size"),
    Key("attention.head_count", "num_attention_heads"),
    Key("vocab_size", "vocab_size"),
    POOLING,
)
SIZES = (
    *SHARED_SIZES,
    Key(
        "attention.head_count_kv",
        lambda c: c.get("num_key_value_heads") or c.require("num_attention_heads"),
    ),
    Key("attention.layer_norm_rms_epsilon", "rms_norm_eps", of=float),
    Key("attention.causal", lambda c: False if looks_ahead(c) else None),
)
HEAD_SIZES = (
    Key("attention.key_length", lambda c: c.head_dim),
    Key("attention.value_length", lambda c: c.head_dim),
)
ROTATED_SIZE = Key("rope.dimension_count", lambda c: rotated_size(c))
ROPE_BASE = Key("rope.freq_base", lambda c: rope_base(c))
KEYS = (*SIZES, *HEAD_SIZES, ROTATED_SIZE, ROPE_BASE)


def layer_normed(
    source: str | Callable[[Configuration], float] = "layer_norm_eps",
) -> tuple[Key, ...]:
    """`KEYS` of a model with layer norms; source: that of their epsilon."""
    rms = "attention.layer_norm_rms_epsilon"
    epsilon = Key("attention.layer_norm_epsilon", source, of=float)
    return (*(key for key in KEYS if key.name != rms), epsilon)


def looks_ahead(config: Configuration) -> bool:
    """Whether attention is bidirectional, as in some models for embeddings."""
    return config.get("is_causal") is False or config.get("use_bidirectional_attention") is True


def yarn_source(setting: str) -> Callable[[Configuration], float | None]:
    """A key's source: a number of the rope parameters, if they are scaled by YaRN."""
    return lambda config: yarn_number(config, setting)


def _scaling(kind: str) -> tuple[Key, Key]:
    """Type and factor of a scaled rotary embedding, where the checkpoint's is of this kind."""
    return (
        Key("rope.scaling.type", lambda c: kind if is_scaled(c, kind) else None),
        Key(
            "rope.scaling.factor",
            lambda c: float(c.rope()["factor"]) if is_scaled(c, kind) else None,
        ),
    )


EXPERT_COUNTS = (
    Key("expert_count", lambda c: c.get("num_local_experts") or c.require("num_experts")),
    Key("expert_used_count", "num_experts_per_tok"),
)
_YARN_NUMBERS = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
LINEAR_SCALING = _scaling("linear")
YARN_SCALING = (
    *_scaling("yarn"),
    Key("rope.scaling.original_context_length", lambda c: original_context(c)),
    Key("rope.scaling.attn_factor", lambda c: yarn_multiplier(c)),
    *(Key(f"rope.scaling.{name}", yarn_source(setting)) for name, setting in _YARN_NUMBERS.items()),
)

EMBEDDINGS = (
    Rule("embed_tokens.weight", "token_embd.weight"),
    Rule("norm.weight", "output_norm.weight"),
    Rule("lm_head.weight", OUTPUT),
)


def attention(*, rotated: bool = False, **conditions: Any) -> tuple[Rule, ...]:
    """Rules for the four projections of attention.

    rotated: readers rotate interleaved pairs, so the rows of q and k are permuted.
    conditions: further arguments of the rules.
    """
    queries: Transform | None = interleaved("num_attention_heads") if rotated else None
    keys: Transform | None = interleaved("num_key_value_heads") if rotated else None
    projections = (("q", "q", queries), ("k", "k", keys), ("v", "v", None), ("o", "output", None))
    return tuple(
        Rule(
            f"layers.{{n}}.self_attn.{source}_proj.*",
            f"blk.{{n}}.attn_{target}.*",
            transform,
            **conditions,
        )
        for source, target, transform in projections
    )


def feed_forward(module: str = "mlp", **conditions: Any) -> tuple[Rule, ...]:
    return tuple(
        Rule(f"layers.{{n}}.{module}.{name}_proj.*", f"blk.{{n}}.ffn_{name}.*", **conditions)
        for name in ("gate", "up", "down")
    )


def llama_rules(*, rotated: bool = False) -> tuple[Rule, ...]:
    """All rules of a model with Llama's tensors; rotated: as in `attention`."""
    return (*EMBEDDINGS, *attention(rotated=rotated), *feed_forward(), *PRE_NORMS)


def experts(
    module: str = "mlp",
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    **conditions: Any,
) -> tuple[Rule, ...]:
    """Rules for the router, and for the experts' gate, up and down (`names`), which are stacked."""
    source = f"layers.{{n}}.{module}"
    targets = zip(names, ("gate", "up", "down"), strict=True)
    return (
        Rule(f"{source}.gate.weight", "blk.{n}.ffn_gate_inp.weight", **conditions),
        *(
            Rule(
                f"{source}.experts.{{e}}.{name}.weight",
                f"blk.{{n}}.ffn_{target}_exps.weight",
                **conditions,
            )
            for name, target in targets
        ),
    )


def stacked_experts(**conditions: Any) -> tuple[Rule, ...]:
    """Rules for experts that are stored as stacks [experts, out, in], gates and ups in one."""
    halves = (
        ("gate_up_proj", "gate", first_half),
        ("gate_up_proj", "up", second_half),
        ("down_proj", "down", None),
    )
    return tuple(
        Rule(
            f"layers.{{n}}.mlp.experts.{source}",
            f"blk.{{n}}.ffn_{target}_exps.weight",
            half,
            each=True,
            **conditions,
        )
        for source, target, half in halves
    )


def states(setting: str) -> Callable[[Configuration, int], bool]:
    """A condition of rules: whether the setting is true."""
    return lambda config, layer: bool(config.get(setting))


def leading_dense(config: Configuration) -> int:
    """The number of leading layers, which are dense: as listed, or as counted."""
    listed, key = config.get("mlp_layer_types"), "first_k_dense_replace"
    if listed is None:
        return config.derived(key, lambda c: int(c.require(key)))
    count = listed.count("dense") if isinstance(listed, list) else 0
    if listed != ["dense"] * count + ["sparse"] * (config.layers - count):
        raise config.error("has `mlp_layer_types` that are not `dense` first and then `sparse`")
    return count


def is_leading(config: Configuration, layer: int) -> bool:
    return layer < leading_dense(config)


def follows(config: Configuration, layer: int) -> bool:
    return not is_leading(config, layer)


def shared_experts(source: str = "mlp.shared_experts", **conditions: Any) -> tuple[Rule, ...]:
    """Rules for a feed-forward beside the experts; source: its module in a layer."""
    return tuple(
        Rule(
            f"layers.{{n}}.{source}.{name}_proj.weight",
            f"blk.{{n}}.ffn_{name}_shexp.weight",
            **conditions,
        )
        for name in ("gate", "up", "down")
    )


GATED_SHARED_EXPERT = (
    *shared_experts("mlp.shared_expert"),
    Rule(
        "layers.{n}.mlp.shared_expert_gate.weight", "blk.{n}.ffn_gate_inp_shexp.weight", flattened
    ),
)
# For models whose leading layers are dense and whose other layers have experts and a shared one.
LEADING_DENSE_KEYS = (
    Key("leading_dense_block_count", lambda c: leading_dense(c)),
    Key("expert_count", "n_routed_experts"),
    Key("expert_used_count", "num_experts_per_tok"),
    Key("expert_shared_count", "n_shared_experts"),
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("expert_weights_scale", "routed_scaling_factor", of=float),
)
SIGMOID_KEYS = (
    Key("expert_gating_func", lambda c: ExpertGatingFuncType.SIGMOID.value),
    Key("expert_group_count", "n_group"),
    Key("expert_group_used_count", "topk_group"),
    Key("expert_weights_norm", "norm_topk_prob", of=bool),
)
LEADING_DENSE = (
    *feed_forward(only=is_leading),
    *experts(only=follows),
    *shared_experts(only=follows),
)
EXPERT_BIAS = Rule(
    "layers.{n}.mlp.gate.e_score_correction_bias", "blk.{n}.exp_probs_b.bias", only=follows
)
PRE_NORMS = (
    Rule("layers.{n}.input_layernorm.weight", "blk.{n}.attn_norm.weight"),
    Rule("layers.{n}.post_attention_layernorm.weight", "blk.{n}.ffn_norm.weight"),
)
# For architectures whose norms have biases.
EMBEDDINGS_AND_BIASED_NORM = (
    EMBEDDINGS[0],
    Rule("norm.*", "output_norm.*"),
    EMBEDDINGS[2],
)
BIASED_PRE_NORMS = (
    Rule("layers.{n}.input_layernorm.*", "blk.{n}.attn_norm.*"),
    Rule("layers.{n}.post_attention_layernorm.*", "blk.{n}.ffn_norm.*"),
)
# For architectures with norms only after attention and feed-forward.
POST_NORMS = (
    Rule("layers.{n}.post_attention_layernorm.weight", "blk.{n}.post_attention_norm.weight"),
    Rule("layers.{n}.post_feedforward_layernorm.weight", "blk.{n}.post_ffw_norm.weight"),
)
# For architectures whose files name the second norm as the checkpoints do.
POST_ATTENTION_NORMS = (
    PRE_NORMS[0],
    POST_NORMS[0],
)
HEAD_NORMS = (
    Rule("layers.{n}.self_attn.q_norm.weight", "blk.{n}.attn_q_norm.weight"),
    Rule("layers.{n}.self_attn.k_norm.weight", "blk.{n}.attn_k_norm.weight"),
)
STATED_HEAD_NORMS = tuple(replace(rule, only=states("use_qk_norm")) for rule in HEAD_NORMS)
# For the Gemma families, whose checkpoints store norm weights less one.
EMBEDDINGS_PLUS_ONE = (
    EMBEDDINGS[0],
    Rule("norm.weight", "output_norm.weight", plus_one),
    EMBEDDINGS[2],
)
NORMS_PLUS_ONE = tuple(
    Rule(f"layers.{{n}}.{source}.weight", f"blk.{{n}}.{target}.weight", plus_one)
    for source, target in (
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "post_attention_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
    )
)
PRE_NORMS_PLUS_ONE = tuple(replace(rule, transform=plus_one) for rule in PRE_NORMS)
HEAD_NORMS_PLUS_ONE = tuple(replace(rule, transform=plus_one) for rule in HEAD_NORMS)


def windows(config: Configuration, *, every: int) -> list[bool]:
    """For each layer whether it has a sliding window: as listed, or as in a pattern of letters (L
    for a window) that is repeated, or all except every n-th, as stated, else `every`-th."""
    listed = config.layer_types()
    if listed is not None:
        return [kind == "sliding_attention" for kind in listed]
    pattern = config.get("sliding_window_pattern", every)
    if isinstance(pattern, str):
        return [pattern[layer % len(pattern)] == "L" for layer in range(config.layers)]
    return [(layer + 1) % pattern != 0 for layer in range(config.layers)]


def unusual_windows(every: int) -> Callable[[Configuration], list[bool] | None]:
    """A key's source: whether each layer has a window; None for all except every `every`-th, which
    readers assume."""

    def source(config: Configuration) -> list[bool] | None:
        stated = windows(config, every=every)
        usual = [(layer + 1) % every != 0 for layer in range(config.layers)]
        return None if stated == usual else stated

    return source


def no_rope_interval(config: Configuration) -> int:
    """The interval of layers without rotation; a list of layers must match the interval."""
    interval = int(config.get("no_rope_layer_interval", 4))
    listed = config.get("no_rope_layers")
    if listed and [bool(rotated) for rotated in listed] != [
        (layer + 1) % interval != 0 for layer in range(config.layers)
    ]:
        raise config.error(f"has `no_rope_layers` that are not every {interval}th layer")
    return interval


def rope_base(config: Configuration, layer_type: str = "full_attention") -> float:
    return float(config.rope(layer_type).get("rope_theta", 10000.0))


def local_rope_base(config: Configuration) -> float:
    """The rotary base of layers with a window. Newer settings nest it under `rope_parameters`;
    older ones have a separate key."""
    older = config.get("rope_local_base_freq")
    if older is not None:
        return float(older)
    nested = "sliding_attention" in (config.get("rope_parameters") or {})
    return rope_base(config, "sliding_attention") if nested else 10000.0


def rotated_size(config: Configuration) -> int:
    """The rotated dimensions of a head: stated outright or as a part of the head, else all."""
    if config.get("rotary_dim") is not None:
        return config.require_size("rotary_dim")
    return int(config.head_dim * float(config.rope().get("partial_rotary_factor", 1.0)))


def rotated_sections(config: Configuration, default: Sequence[int]) -> list[int]:
    """The numbers of frequencies that are rotated by time, row and column."""
    return [int(count) for count in config.rope().get("mrope_section", default)]


def sections_key(default: Sequence[int]) -> Key:
    """The sections in llama.cpp's files, which have an empty one for a fourth axis."""
    return Key(
        "rope.dimension_sections",
        lambda c: [*rotated_sections(c, default), 0],
        flavours=(LLAMA_CPP,),
    )


def is_scaled(config: Configuration, kind: str) -> bool:
    return config.rope()["rope_type"] == kind


def yarn_number(config: Configuration, key: str) -> float | None:
    value = config.rope().get(key) if is_scaled(config, "yarn") else None
    return None if value is None else float(value)


def yarn_multiplier(config: Configuration) -> float | None:
    """The factor on YaRN's default magnitude, if the checkpoint states a magnitude."""
    stated = yarn_number(config, "attention_factor")
    if stated is None:
        return None
    factor = float(config.rope()["factor"])
    return stated / (0.1 * math.log(factor) + 1) if factor > 1 else stated


def original_context(config: Configuration) -> int | None:
    if not is_scaled(config, "yarn"):
        return None
    stated = config.rope().get("original_max_position_embeddings")
    return int(stated if stated is not None else config.require("max_position_embeddings"))


def llama3_factors(config: Configuration) -> Tensor | None:
    """float32 [rotated / 2]: divisors of the frequencies in Llama 3.1 and later."""
    rope = config.rope()
    if rope["rope_type"] != "llama3":
        return None
    return llama3_divisors(rope, rotated_size(config), rope_base(config))


def llama3_divisors(rope: Mapping[str, Any], size: int, base: float) -> Tensor:
    """float32 [size / 2]: divisors of the frequencies base^(-2i / size), by these parameters."""
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    turns = rope["original_max_position_embeddings"] / (2 * math.pi * base**exponents)
    smooth = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns >= low).double()
    return (1 / ((1 - smooth) / float(rope["factor"]) + smooth)).float()


LLAMA3_FACTORS = Computed("rope_freqs.weight", llama3_factors)

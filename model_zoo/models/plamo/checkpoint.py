"""PLaMo 1 to 3: conversion of text model checkpoints to GGUF."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from model_zoo.convert import checks, decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Conversion, Key, Rule, Transform
from model_zoo.convert.transforms import plus_one, rates, squeezed
from runtime.errors import UnsupportedModelError

_LAYER = "layers.layers.{n}"


def _attends(config: Configuration, layer: int) -> bool:
    """Of PLaMo 2: one layer in `mamba_step`, in its middle, or the last of fewer layers."""
    if not config.get("mamba_enabled", True):
        return True
    step = config.require_size("mamba_step")
    if config.layers <= step // 2:
        return layer == config.layers - 1
    return layer % step == step // 2


def _recurs(config: Configuration, layer: int) -> bool:
    return not _attends(config, layer)


def _key_heads(config: Configuration) -> list[int]:
    """Key heads of each layer of PLaMo 2, 0 for recurrent layers. llama.cpp's converter writes 0
    heads of recurrent layers, too; its reader then hangs, as the first layer has none."""
    count = config.require_size("num_key_value_heads")
    return [count if _attends(config, layer) else 0 for layer in range(config.layers)]


def _window(config: Configuration) -> int | None:
    """The tokens that a layer of PLaMo 2 attends to, its own included; None for all."""
    attending = {layer for layer in range(config.layers) if _attends(config, layer)}
    full = attending & set(config.get("full_attention_idx") or ())
    if full == attending:
        return None
    if full:
        raise UnsupportedModelError(
            f"{config.path}: some layers have a window (`full_attention_idx`); files of this "
            "architecture can express one for all or none."
        )
    return config.require_size("attention_window_size") + 1


def _shared_key_heads(config: Configuration) -> int:
    """Key heads of PLaMo 1: as many as needed if each belongs to at most `n_shared_head` heads."""
    heads, shared = config.require_size("num_attention_heads"), config.require_size("n_shared_head")
    if heads % shared:
        raise config.error(f"has {heads} heads, {shared} of which share a key; they cannot")
    return heads // shared


def _grouped(dim: int) -> Transform:
    """Heads with the same key become neighbours along the dimension; in the checkpoints of PLaMo 1,
    head h has the key h % (number of keys)."""

    def transform(config: Configuration, weight: Tensor) -> Tensor:
        shape = config.require_size("n_shared_head"), _shared_key_heads(config), -1
        return weight.unflatten(dim, shape).transpose(dim, dim + 1).flatten(dim, dim + 2)

    return transform


def _plus(number: float) -> Transform:
    """Adds the number to norm weights, which the checkpoints store less it."""
    return lambda config, weight: weight.float() + number


# Readers expect the names of some norms without a suffix.
_NORMED_LAYER = (
    Rule("embed_tokens.weight", "token_embd.weight"),
    Rule("norm.weight", "output_norm.weight", plus_one),
    decoders.EMBEDDINGS[2],
    Rule(f"{_LAYER}.pre_mixer_norm.weight", "blk.{n}.attn_norm.weight", plus_one),
    Rule(f"{_LAYER}.post_mixer_norm.weight", "blk.{n}.post_attention_norm", _plus(1 / 5)),
    Rule(f"{_LAYER}.pre_mlp_norm.weight", "blk.{n}.ffn_norm.weight", plus_one),
    Rule(f"{_LAYER}.post_mlp_norm.weight", "blk.{n}.post_ffw_norm", _plus(1 / 5**1.5)),
    Rule(f"{_LAYER}.mlp.gate_up_proj.weight", "blk.{n}.ffn_up.weight"),
    Rule(f"{_LAYER}.mlp.down_proj.weight", "blk.{n}.ffn_down.weight"),
)
_PROJECTIONS = {"qkv_proj.weight": "attn_qkv.weight", "o_proj.weight": "attn_output.weight"}
_RECURRENT: Mapping[str, tuple[str, Transform | None]] = {
    "in_proj.weight": ("ssm_in.weight", None),
    "conv1d.weight": ("ssm_conv1d.weight", squeezed),
    "bcdt_proj.weight": ("ssm_x.weight", None),
    "dt_proj.weight": ("ssm_dt.weight", None),
    "dt_bias": ("ssm_dt.bias", None),
    "A_log": ("ssm_a", rates),
    "D": ("ssm_d", None),
    "B_norm_weight": ("ssm_b_norm", None),
    "C_norm_weight": ("ssm_c_norm", None),
    "dt_norm_weight": ("ssm_dt_norm", None),
    "out_proj.weight": ("ssm_out.weight", None),
}
_PLAMO2_DEFAULTS: Mapping[str, Any] = MappingProxyType({"mamba_step": 2, "rope_theta": 10000})

PLAMO = Conversion(
    serves=("PlamoForCausalLM",),
    architecture="plamo",
    keys=(
        *(key for key in decoders.SIZES if key.name != "attention.head_count_kv"),
        Key("attention.head_count_kv", _shared_key_heads),
    ),
    rules=(
        *decoders.EMBEDDINGS,
        Rule(f"{_LAYER}.norm.weight", "blk.{n}.attn_norm.weight"),
        Rule(f"{_LAYER}.self_attn.q_proj.weight", "blk.{n}.attn_q.weight", _grouped(0)),
        Rule(f"{_LAYER}.self_attn.k_proj.weight", "blk.{n}.attn_k.weight"),
        Rule(f"{_LAYER}.self_attn.v_proj.weight", "blk.{n}.attn_v.weight"),
        Rule(f"{_LAYER}.self_attn.o_proj.weight", "blk.{n}.attn_output.weight", _grouped(1)),
        *(
            Rule(f"{_LAYER}.mlp.{name}_proj.weight", f"blk.{{n}}.ffn_{name}.weight")
            for name in ("gate", "up", "down")
        ),
    ),
    drop=(f"{_LAYER}.self_attn.rotary_emb.**",),
    defaults={"max_position_embeddings": 4096, "n_shared_head": 8, "rms_norm_eps": 1e-6},
)

PLAMO2 = Conversion(
    serves=("Plamo2ForCausalLM", "PLaMo2ForCausalLM"),
    architecture="plamo2",
    keys=(
        *(key for key in decoders.KEYS if key.name != "attention.head_count_kv"),
        Key("attention.head_count_kv", _key_heads),
        Key("attention.sliding_window", _window),
        Key("ssm.conv_kernel", "mamba_d_conv"),
        Key("ssm.state_size", "mamba_d_state"),
        Key("ssm.group_count", lambda c: 0),
        Key("ssm.time_step_rank", "mamba_num_heads"),
        Key("ssm.inner_size", lambda c: c.require_size("mamba_num_heads") * c.head_dim),
    ),
    rules=(
        *_NORMED_LAYER,
        *(
            Rule(f"{_LAYER}.mixer.{source}", f"blk.{{n}}.{target}", only=_attends)
            for source, target in _PROJECTIONS.items()
        ),
        *(
            Rule(
                f"{_LAYER}.mixer.{name}_weight",
                f"blk.{{n}}.attn_{name}_norm.weight",
                only=_attends,
                keep=True,
            )
            for name in ("q", "k")
        ),
        *(
            Rule(
                f"{_LAYER}.mixer.{source}",
                f"blk.{{n}}.{target}",
                transform,
                only=_recurs,
                keep="proj" not in source,
            )
            for source, (target, transform) in _RECURRENT.items()
        ),
    ),
    defaults=_PLAMO2_DEFAULTS,
    spellings={"head_dim": "hidden_size_per_head"},
    check=checks.only_scalings(),
)

PLAMO3 = Conversion(
    serves=("Plamo3ForCausalLM", "PLaMo3ForCausalLM"),
    architecture="plamo3",
    keys=(
        *decoders.KEYS,
        Key("attention.sliding_window", "window_size"),
        Key("attention.sliding_window_pattern", "sliding_window_pattern"),
        Key("rope.freq_base_swa", decoders.local_rope_base),
    ),
    rules=(
        *_NORMED_LAYER,
        *(
            Rule(f"{_LAYER}.mixer.{source}", f"blk.{{n}}.{target}")
            for source, target in _PROJECTIONS.items()
        ),
        *(
            Rule(
                f"{_LAYER}.mixer.{name}_norm.weight",
                f"blk.{{n}}.attn_{name}_norm.weight",
                plus_one,
            )
            for name in ("q", "k")
        ),
    ),
    defaults={"sliding_window_pattern": 8, "rope_theta": 1_000_000},
    spellings={"rope_local_base_freq": "rope_local_theta", "window_size": "sliding_window"},
    check=checks.all_of(
        checks.only_scalings(), checks.only_values(rope_scaling_factor=1, attention_bias=False)
    ),
)

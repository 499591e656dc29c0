"""Gemma 4: conversion of vision checkpoints to GGUF."""

from torch import Tensor

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key, Rule
from model_zoo.images.normalise import UNCHANGED
from model_zoo.layers.vision.clamped import BOUNDS
from model_zoo.layers.vision.vision_sizes import CHANNELS
from model_zoo.models.gemma4.vision import AREA_KEY, BASE, EPS, POOLED, POOLED_KEY, PROJECTION, ROWS
from runtime.errors import UnsupportedModelError


def _square_patches(config: Configuration, weight: Tensor) -> Tensor:
    """(hidden, row * column * channel) -> (hidden, channel, row, column)"""
    side = config.require_size("patch_size")
    return weight.view(len(weight), side, side, CHANNELS).permute(0, 3, 1, 2)


def _as_vector(config: Configuration, bound: Tensor) -> Tensor:
    return bound.reshape(1)


def _area(config: Configuration) -> int | None:
    """The area in pixels, if the processor allows another number of rows than readers assume."""
    rows = int(towers.preprocessing(config).get("max_soft_tokens", ROWS))
    unit = config.require_size("patch_size") * config.require_size("pooling_kernel_size")
    return None if rows == ROWS else rows * unit**2


def _plain_heads(config: Configuration) -> None:
    heads = config.require_size("num_attention_heads")
    alike = config.get("num_key_value_heads", heads) == heads
    if not alike or config.head_dim * heads != config.require_size("hidden_size"):
        raise UnsupportedModelError(
            f"{config.path}: the heads of its vision model share keys, or their sizes do not add "
            "up to the hidden size, which files of this architecture cannot express."
        )


def _known_direction(config: Configuration) -> None:
    """Readers decide by the per-layer inputs whether image rows are bidirectional."""
    _check_direction(config, config.model.get("use_bidirectional_attention"))


def _known_direction_of_unified(config: Configuration) -> None:
    """For the 12B model, which is bidirectional unless its settings state otherwise."""
    text = config.model.whole.get("text_config") or {}
    _check_direction(config, text.get("use_bidirectional_attention", "vision"))


def _check_direction(config: Configuration, stated: str | None) -> None:
    small = bool(config.model.get("hidden_size_per_layer_input"))
    if (stated == "vision") is small:
        raise UnsupportedModelError(
            f'{config.path}: `use_bidirectional_attention` must be "vision" in models without '
            "per-layer inputs, and in no others; files of this architecture do not state it."
        )


_MODULES = (
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_out"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
)


_NORMS = (
    ("input_layernorm", "ln1"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "attn_post_norm"),
    ("pre_feedforward_layernorm", "ln2"),
    ("post_feedforward_layernorm", "ffn_post_norm"),
)


_STORED, _NAMED = "encoder.layers.{n}", "v.blk.{n}"


VISION = Conversion(
    serves=("Gemma4ForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip", OLLAMA: "gemma4"},
    keys=(
        *towers.SIZES,
        Key("vision.num_channels", lambda c: CHANNELS, flavours=(OLLAMA,)),
        towers.epsilon("rms_norm_eps", OLLAMA),
        Key(POOLED_KEY, "pooling_kernel_size"),
        Key(AREA_KEY, _area),
        *towers.clip("gemma4v", UNCHANGED, eps="rms_norm_eps"),
        Key("vision.image_size", lambda c: 224, flavours=(LLAMA_CPP,)),  # readers require them
    ),
    rules=(
        Rule("patch_embedder.input_proj.weight", "v.patch_embd.weight", _square_patches),
        Rule("patch_embedder.position_embedding_table", "v.position_embd.weight", keep=True),
        *(
            Rule(f"{_STORED}.{module}.linear.weight", f"{_NAMED}.{name}.weight")
            for module, name in _MODULES
        ),
        *(
            Rule(
                f"{_STORED}.{module}.{bound}",
                f"{_NAMED}.{name}.{bound}",
                _as_vector,
                optional=True,
                keep=True,
            )
            for module, name in _MODULES
            for bound in BOUNDS
        ),
        *(Rule(f"{_STORED}.{module}.weight", f"{_NAMED}.{name}.weight") for module, name in _NORMS),
        Rule("std_bias", "v.std_bias", optional=True, keep=True),
        Rule("std_scale", "v.std_scale", optional=True, keep=True),
        Rule("embed_vision.embedding_projection.weight", f"{PROJECTION}.weight"),
    ),
    roots=towers.roots("vision_tower"),
    drop=(*towers.TEXT, "audio_tower.**", "embed_audio.**"),
    defaults={
        "pooling_kernel_size": POOLED,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": EPS,
    },
    check=checks.all_of(
        towers.known_setting("hidden_activation", "gelu_pytorch_tanh"),
        towers.known_rope_base(BASE),
        _plain_heads,
        _known_direction,
    ),
)


def _by_channel(config: Configuration, values: Tensor) -> Tensor:
    """[..., row * column * channel] -> [..., channel * row * column]"""
    side = config.require_size("patch_size") * config.require_size("pooling_kernel_size")
    return values.unflatten(-1, (side, side, CHANNELS)).movedim(-1, -3).flatten(-3)


def _by_axis(config: Configuration, table: Tensor) -> Tensor:
    """(positions, axes, hidden) -> (axes, positions, hidden)"""
    return table.transpose(0, 1)


# The 12B model, which has no layers.
UNIFIED_VISION = Conversion(
    serves=("Gemma4UnifiedForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip"},
    keys=(
        Key("vision.embedding_length", "mm_embed_dim"),
        Key("vision.patch_size", "patch_size"),
        Key(POOLED_KEY, "pooling_kernel_size"),
        Key(AREA_KEY, _area),
        *towers.clip("gemma4uv", UNCHANGED, eps="rms_norm_eps"),
        # Readers require these keys.
        Key("vision.image_size", lambda c: 224),
        *(
            Key(f"vision.{name}", lambda c: 0)
            for name in ("block_count", "feed_forward_length", "attention.head_count")
        ),
    ),
    rules=(
        *(
            Rule(f"patch_ln1.{part}", f"v.patch_norm.1.{part}", _by_channel, keep=True)
            for part in ("weight", "bias")
        ),
        Rule("patch_dense.weight", "v.patch_embd.weight", _by_channel),
        Rule("patch_dense.bias", "v.patch_embd.bias"),
        Rule("patch_ln2.*", "v.patch_norm.2.*"),
        Rule("pos_embedding", "v.position_embd.weight", _by_axis, keep=True),
        Rule("pos_norm.*", "v.patch_norm.3.*"),
        Rule("embed_vision.embedding_projection.weight", f"{PROJECTION}.weight"),
    ),
    roots=towers.roots("vision_embedder"),
    drop=(*towers.TEXT, "embed_audio.**"),
    defaults={
        "patch_size": 16,
        "pooling_kernel_size": POOLED,
        "mm_embed_dim": 3840,
        "rms_norm_eps": EPS,
    },
    check=_known_direction_of_unified,
)

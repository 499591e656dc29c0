"""Qwen2.5-VL and EXAONE 4.5: conversion of vision checkpoints to GGUF."""

from collections.abc import Sequence
from dataclasses import replace

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key, Rule
from model_zoo.images.normalise import CLIP
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.layers.vision.vision_sizes import KV_HEADS_KEY, MERGED
from model_zoo.models.qwen25vl.vision import (
    EPS,
    FILE_FRAMES,
    FRAMES,
    FULL_LAYERS,
    OLLAMA_FRAMES,
    WINDOW,
)
from runtime.errors import UnsupportedModelError


def _full_every(config: Configuration) -> int:
    """The interval of layers that attend to the whole image, as llama.cpp's files state it."""
    listed: Sequence[int] = config.require("fullatt_block_indexes")
    every = listed[0] + 1
    if list(listed) != list(range(every - 1, config.layers, every)):
        raise UnsupportedModelError(
            f"{config.path}: the layers {list(listed)} of {config.layers} attend to the whole "
            "image; files of this flavour can only express every n-th layer."
        )
    return every


_MODULES = (
    ("norm1", "ln1"),
    ("attn.proj", "attn_out"),
    ("norm2", "ln2"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
)


def _keys(projector: str) -> tuple[Key, ...]:
    return (
        *towers.SIZES,
        Key("vision.spatial_merge_size", "spatial_merge_size"),
        Key("vision.temporal_patch_size", "temporal_patch_size", flavours=(OLLAMA,)),
        Key("vision.num_channels", "in_channels", flavours=(OLLAMA,)),
        Key("vision.window_size", "window_size"),
        Key("vision.fullatt_block_indexes", "fullatt_block_indexes", flavours=(OLLAMA,)),
        Key("vision.rope.freq_base", towers.rope_base, flavours=(OLLAMA,)),
        Key("vision.max_pixels", towers.most_pixels, flavours=(OLLAMA,)),
        towers.epsilon(EPS, OLLAMA),
        *towers.clip(projector, CLIP, eps=EPS),
        Key("use_silu", lambda c: True, flavours=(LLAMA_CPP,)),
        # The value has no effect, but readers require the key.
        Key("vision.image_size", lambda c: 560, flavours=(LLAMA_CPP,)),
        Key("vision.n_wa_pattern", _full_every, flavours=(LLAMA_CPP,)),
        Key("vision.image_max_pixels", towers.most_pixels, flavours=(LLAMA_CPP,)),
        Key("vision.image_min_pixels", towers.least_pixels, flavours=(LLAMA_CPP,)),
    )


def _rules(*queries_keys_values: Rule) -> tuple[Rule, ...]:
    return (
        *(
            rule
            for index in range(FRAMES)
            for rule in towers.both(
                "patch_embed.proj.weight",
                f"v.{FILE_FRAMES[index]}",
                f"v.{OLLAMA_FRAMES[index]}",
                towers.frame(index),
            )
        ),
        *queries_keys_values,
        *towers.layers("blocks.{n}", _MODULES),
        *towers.both("merger.ln_q.weight", "v.post_ln.weight", "v.merger.ln_q.weight"),
        *towers.both("merger.mlp.0.*", "mm.0.*", "v.merger.mlp.0.*"),
        *towers.both("merger.mlp.2.*", "mm.2.*", "v.merger.mlp.2.*"),
    )


VISION = Conversion(
    serves=("Qwen2_5_VLForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip", OLLAMA: "qwen25vl"},
    keys=_keys("qwen2.5vl_merger"),
    rules=_rules(*towers.split_qkv(LLAMA_CPP, OLLAMA)),
    roots=towers.roots("visual"),
    drop=towers.TEXT,
    defaults={
        "spatial_merge_size": MERGED,
        "temporal_patch_size": FRAMES,
        "in_channels": 3,
        "window_size": WINDOW,
        "fullatt_block_indexes": list(FULL_LAYERS),
        "num_attention_heads": 16,
        "patch_size": 14,
    },
    spellings={
        "num_hidden_layers": "depth",
        "num_attention_heads": "num_heads",
        "in_channels": "in_chans",
    },
    check=checks.all_of(
        towers.known_setting("hidden_act", "silu"),
        towers.known_setting("in_channels", 3),
        towers.known_setting("temporal_patch_size", FRAMES),
    ),
    checks={
        LLAMA_CPP: checks.all_of(
            towers.known_rope_base(DEFAULT_BASE), towers.known_setting("window_size", WINDOW)
        )
    },
)


EXAONE_VISION = replace(
    VISION,
    serves=("Exaone4_5_ForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip"},
    keys=(
        *_keys("exaone4_5"),
        Key(KV_HEADS_KEY, "num_key_value_heads"),
    ),
    rules=_rules(Rule("blocks.{n}.attn.qkv.*", "v.blk.{n}.attn_qkv.*")),
    defaults={**VISION.defaults, "num_key_value_heads": 8},
)

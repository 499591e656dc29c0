"""GLM-4.1V and later, and GLM-OCR: conversion of vision checkpoints to GGUF."""

from collections.abc import Callable
from dataclasses import replace

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key, Rule
from model_zoo.images.normalise import CLIP
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.layers.vision.vision_sizes import MERGED
from model_zoo.models.glm4v.vision import (
    EPS,
    FILE_FRAMES,
    FRAMES,
    OLLAMA_EPS_KEY,
    OLLAMA_FRAMES,
    of_a_frame,
)


def _of_a_frame(
    source: Callable[[Configuration], int | None],
) -> Callable[[Configuration], int | None]:
    """An area in pixels; processors of checkpoints count all frames of a patch."""

    def area(config: Configuration) -> int | None:
        pixels = source(config)
        return None if pixels is None else of_a_frame(pixels)

    return area


_MODULES = (
    ("norm1", "ln1"),
    ("attn.qkv", "attn_qkv"),
    ("attn.proj", "attn_out"),
    ("norm2", "ln2"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
)
_RULES = (
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
    Rule("patch_embed.proj.bias", "v.patch_embd.bias"),
    *towers.layers("blocks.{n}", _MODULES),
    Rule("post_layernorm.weight", "v.post_ln.weight"),
    Rule("downsample.*", "mm.patch_merger.*"),
    Rule("merger.proj.weight", "mm.model.fc.weight"),
    Rule("merger.post_projection_norm.*", "mm.post_norm.*"),
    *(Rule(f"merger.{name}_proj.weight", f"mm.{name}.weight") for name in ("gate", "up", "down")),
)


VISION = Conversion(
    serves=(
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "Glm46VForConditionalGeneration",
    ),
    architecture={LLAMA_CPP: "clip"},
    keys=(
        *towers.SIZES,
        towers.IMAGE_SIZE,
        Key("vision.spatial_merge_size", "spatial_merge_size"),
        *towers.clip("glm4v", CLIP, eps="rms_norm_eps"),
        Key("use_silu", lambda c: True, flavours=(LLAMA_CPP,)),
        Key(
            "vision.image_max_pixels",
            _of_a_frame(towers.most_pixels),
            flavours=(LLAMA_CPP,),
        ),
        Key(
            "vision.image_min_pixels",
            _of_a_frame(towers.least_pixels),
            flavours=(LLAMA_CPP,),
        ),
    ),
    rules=(
        *_RULES,
        Rule("post_conv_layernorm.weight", "v.norm_embd.weight"),
        Rule("embeddings.position_embedding.weight", "v.position_embd.weight"),
    ),
    roots=towers.roots("visual"),
    drop=towers.TEXT,
    defaults={
        "num_hidden_layers": 24,
        "hidden_size": 1536,
        "intermediate_size": 13696,
        "num_attention_heads": 12,
        "image_size": 336,
        "patch_size": 14,
        "rms_norm_eps": EPS,
        "spatial_merge_size": MERGED,
    },
    spellings={"num_hidden_layers": "depth", "num_attention_heads": "num_heads"},
    check=checks.all_of(
        towers.known_setting("hidden_act", "silu"),
        towers.known_setting("in_channels", 3),
        towers.known_setting("temporal_patch_size", FRAMES),
        towers.known_rope_base(DEFAULT_BASE),
    ),
)


OCR = replace(
    VISION,
    serves=("GlmOcrForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip", OLLAMA: "glmocr"},
    keys=(
        *VISION.keys,
        Key("vision.temporal_patch_size", "temporal_patch_size", flavours=(OLLAMA,)),
        Key("vision.num_channels", "in_channels", flavours=(OLLAMA,)),
        Key("vision.out_hidden_size", "out_hidden_size", flavours=(OLLAMA,)),
        Key("vision.intermediate_size", "intermediate_size", flavours=(OLLAMA,)),
        Key("vision.max_pixels", towers.most_pixels, flavours=(OLLAMA,)),
        Key("vision.min_pixels", towers.least_pixels, flavours=(OLLAMA,)),
        *towers.colours(CLIP, OLLAMA),
        towers.epsilon("rms_norm_eps", OLLAMA, name=OLLAMA_EPS_KEY),
    ),
    rules=(
        *_RULES,
        Rule("blocks.{n}.attn.q_norm.weight", "v.blk.{n}.attn_q_norm.weight"),
        Rule("blocks.{n}.attn.k_norm.weight", "v.blk.{n}.attn_k_norm.weight"),
    ),
    defaults={
        **VISION.defaults,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "out_hidden_size": 1536,
        "temporal_patch_size": FRAMES,
        "in_channels": 3,
    },
)

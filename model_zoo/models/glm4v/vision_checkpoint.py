"""GLM-4.1V and later, and GLM-OCR: conversion of vision checkpoints to GGUF."""

from collections.abc import Callable
from dataclasses import replace

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.images.normalise import CLIP
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.models.glm4v.vision import EPS, FILE_FRAMES, FRAMES, MERGED


def _of_a_frame(
    source: Callable[[Configuration], int | None],
) -> Callable[[Configuration], int | None]:
    """An area in pixels; processors of checkpoints count all frames of a patch."""

    def area(config: Configuration) -> int | None:
        pixels = source(config)
        return None if pixels is None else -(-pixels // FRAMES)

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
        Rule("patch_embed.proj.weight", f"v.{name}", towers.frame(index))
        for index, name in enumerate(FILE_FRAMES)
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
        Key("use_silu", lambda c: True),
        Key("vision.image_max_pixels", _of_a_frame(towers.most_pixels)),
        Key("vision.image_min_pixels", _of_a_frame(towers.least_pixels)),
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
    },
)

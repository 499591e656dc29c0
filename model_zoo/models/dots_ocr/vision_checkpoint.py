"""dots.ocr: conversion of vision checkpoints to GGUF."""

from model_zoo.convert import checks, towers
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.images.normalise import CLIP
from model_zoo.layers.vision.vision_sizes import MERGED
from model_zoo.models.dots_ocr.vision import EPS, MERGED_KEY

WIDTH_KEY = "vision.embedding_length"
_MODULES = (
    ("norm1", "ln1"),
    ("attn.qkv", "attn_qkv"),
    ("attn.proj", "attn_out"),
    ("norm2", "ln2"),
    ("mlp.fc1", "ffn_gate"),
    ("mlp.fc3", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
)

VISION = Conversion(
    serves=("DotsOCRForCausalLM",),
    architecture={LLAMA_CPP: "clip"},
    keys=(
        *(key for key in towers.SIZES if key.name != WIDTH_KEY),
        # Their `hidden_size` is that of the text model.
        Key(WIDTH_KEY, "embed_dim"),
        # Readers require the key, which has no effect.
        Key("vision.image_size", lambda c: 0),
        Key(MERGED_KEY, "spatial_merge_size"),
        *towers.clip("dots_ocr", CLIP, eps="rms_norm_eps"),
        Key("use_silu", lambda c: True),
        Key("vision.image_max_pixels", towers.most_pixels),
        Key("vision.image_min_pixels", towers.least_pixels),
    ),
    rules=(
        Rule("patch_embed.patchifier.proj.*", "v.patch_embd.*"),
        Rule("patch_embed.patchifier.norm.weight", "v.pre_ln.weight"),
        *towers.layers("blocks.{n}", _MODULES),
        Rule("post_trunk_norm.weight", "mm.post_norm.weight"),
        Rule("merger.ln_q.*", "mm.input_norm.*"),
        *(Rule(f"merger.mlp.{index}.*", f"mm.{index}.*") for index in (0, 2)),
    ),
    roots=towers.roots("vision_tower"),
    drop=towers.TEXT,
    defaults={
        "embed_dim": 1536,
        "intermediate_size": 4224,
        "num_hidden_layers": 42,
        "num_attention_heads": 12,
        "patch_size": 14,
        "spatial_merge_size": MERGED,
        "rms_norm_eps": EPS,
    },
    check=checks.all_of(
        towers.known_setting("num_channels", 3),
        towers.known_setting("temporal_patch_size", 1),
        towers.known_setting("use_bias", False),
        towers.known_setting("is_causal", False),
        towers.known_setting("post_norm", True),
    ),
)

"""PaddleOCR-VL: conversion of vision checkpoints to GGUF."""

from math import isqrt

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.images.normalise import CLIP
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.layers.vision.vision_sizes import MERGED
from model_zoo.models.paddleocr.vision import EPS


def _longest_side(config: Configuration) -> int:
    """The side of the largest square image, which readers plan memory for."""
    most = towers.most_pixels(config)
    return config.require_size("image_size") if most is None else isqrt(most)


VISION = Conversion(
    serves=("PaddleOCRVLForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip"},
    keys=(
        *towers.SIZES,
        Key("vision.image_size", _longest_side),
        Key("vision.spatial_merge_size", "spatial_merge_size"),
        *towers.clip("paddleocr", CLIP, eps="layer_norm_eps"),
        Key("use_gelu", lambda c: True),
        Key("vision.image_max_pixels", towers.most_pixels),
        Key("vision.image_min_pixels", towers.least_pixels),
    ),
    rules=(
        Rule("vision_model.embeddings.patch_embedding.*", "v.patch_embd.*"),
        Rule("vision_model.embeddings.position_embedding.weight", "v.position_embd.weight"),
        *towers.layers("vision_model.encoder.layers.{n}", towers.CLIP_MODULES),
        Rule("vision_model.post_layernorm.*", "v.post_ln.*"),
        *(
            Rule(f"{projector}.{source}.*", f"mm.{target}.*")
            for projector in ("mlp_AR", "projector")
            for source, target in (("pre_norm", "input_norm"), ("linear_1", "1"), ("linear_2", "2"))
        ),
    ),
    roots=towers.roots("visual"),
    # The head and the second table of positions, which no image uses.
    drop=(
        *towers.TEXT,
        "vision_model.head.**",
        "vision_model.embeddings.packing_position_embedding.weight",
    ),
    defaults={
        "layer_norm_eps": EPS,
        "spatial_merge_size": MERGED,
        "patch_size": 14,
        "image_size": 384,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
    },
    check=checks.all_of(
        towers.known_setting("hidden_act", "gelu_pytorch_tanh"),
        towers.known_setting("num_channels", 3),
        towers.known_rope_base(DEFAULT_BASE),
    ),
)

"""LLaVA: conversion of vision checkpoints to GGUF."""

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.images.normalise import CLIP
from model_zoo.models.llava.vision import ASPECT_KEY, EPS, FEATURE_KEY, MIDDLE, PADDED


def _feature_layer(config: Configuration) -> int:
    """The number of computed layers; negative numbers count from the end."""
    stated = config.model.get("vision_feature_layer", -2)
    if not isinstance(stated, int):
        raise config.error(f"takes features from the layers {stated}; only one is supported")
    return stated if stated >= 0 else config.layers + stated + 1


def _aspect(config: Configuration) -> str:
    """How the checkpoint's processor makes images square. The settings decide, since several
    processor classes share them."""
    stated = towers.preprocessing(config)
    if stated.get("do_pad"):
        return PADDED
    if not stated.get("do_center_crop", True):
        raise config.error("has a processor that neither pads nor crops images to a square")
    return MIDDLE


VISION = Conversion(
    serves=("LlavaForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip"},
    keys=(
        *towers.SIZES,
        Key(FEATURE_KEY, lambda c: [_feature_layer(c)]),
        towers.IMAGE_SIZE,
        *towers.clip("mlp", CLIP, eps="layer_norm_eps"),
        Key("has_llava_projector", lambda c: True),
        Key(ASPECT_KEY, _aspect),
    ),
    rules=(
        Rule("embeddings.class_embedding", "v.class_embd", keep=True),
        Rule("embeddings.patch_embedding.weight", "v.patch_embd.weight"),
        Rule("embeddings.position_embedding.weight", "v.position_embd.weight"),
        Rule("pre_layrnorm.*", "v.pre_ln.*"),
        *towers.layers("encoder.layers.{n}", towers.CLIP_MODULES),
        Rule("multi_modal_projector.linear_1.*", "mm.0.*"),
        Rule("multi_modal_projector.linear_2.*", "mm.2.*"),
    ),
    roots=towers.roots("vision_tower.vision_model", "vision_tower"),
    drop=(
        *towers.TEXT,
        "post_layernorm.*",
        "embeddings.position_ids",
    ),
    defaults={"layer_norm_eps": EPS, "hidden_act": "quick_gelu"},
    check=checks.all_of(
        towers.known_setting("model_type", "clip_vision_model"),
        towers.known_setting("hidden_act", "quick_gelu"),
        towers.known_setting("num_channels", 3),
        towers.same_side("crop_size"),
        towers.same_side("size"),
        towers.known_of_model("projector_hidden_act", "gelu"),
        towers.known_of_model("vision_feature_select_strategy", "default"),
    ),
)

"""LLaVA: conversion of vision checkpoints to GGUF."""

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.images.normalise import CLIP
from model_zoo.models.llava.vision import ASPECT_KEY, EPS, FEATURE_KEY, MIDDLE, PADDED
from runtime.errors import UnsupportedModelError

CLIP_TYPE, SIGLIP_EPS = "clip_vision_model", 1e-6


def _features(config: Configuration) -> list[int]:
    """The layers whose outputs are projected, counted from 1; negative numbers count from the
    end."""
    stated = config.model.get("vision_feature_layer", -2)
    listed = stated if isinstance(stated, list) else [stated]
    layers = [int(layer) if layer >= 0 else config.layers + layer + 1 for layer in listed]
    known = set(range(1, config.layers + 1))
    if not layers or layers != sorted(known.intersection(layers)):
        raise config.error(
            f"takes features from the layers {str(stated)[:80]}, which are not some of "
            f"{config.layers} layers in ascending order"
        )
    return layers


def _is_clip(config: Configuration, _: int = 0) -> bool:
    return bool(config.get("model_type") == CLIP_TYPE)


def _activation(config: Configuration) -> None:
    known = "quick_gelu" if _is_clip(config) else "gelu_pytorch_tanh"
    towers.known_setting("hidden_act", known)(config)


def _rows(config: Configuration) -> None:
    """The rows of patches must be projected, and not that of the class."""
    known = "default" if _is_clip(config) else "full"
    stated = config.model.get("vision_feature_select_strategy", "default")
    if stated != known:
        raise UnsupportedModelError(
            f"{config.path}: `vision_feature_select_strategy` of the model is {str(stated)[:80]}, "
            f"where files with this vision model mean {known}."
        )


def _eps(config: Configuration) -> float:
    return float(config.get("layer_norm_eps", EPS if _is_clip(config) else SIGLIP_EPS))


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
        Key(FEATURE_KEY, _features),
        towers.IMAGE_SIZE,
        *towers.clip("mlp", CLIP, eps=_eps),
        Key("use_gelu", lambda c: None if _is_clip(c) else True),
        Key("has_llava_projector", lambda c: True),
        Key(ASPECT_KEY, _aspect),
    ),
    rules=(
        Rule("embeddings.class_embedding", "v.class_embd", keep=True, only=_is_clip),
        Rule("embeddings.patch_embedding.*", "v.patch_embd.*"),
        Rule("embeddings.position_embedding.weight", "v.position_embd.weight"),
        Rule("pre_layrnorm.*", "v.pre_ln.*", only=_is_clip),
        *towers.layers("encoder.layers.{n}", towers.CLIP_MODULES),
        Rule("multi_modal_projector.linear_1.*", "mm.0.*"),
        Rule("multi_modal_projector.linear_2.*", "mm.2.*"),
    ),
    roots=towers.roots("vision_tower.vision_model", "vision_tower"),
    drop=(
        *towers.TEXT,
        "post_layernorm.*",
        "embeddings.position_ids",
        "head.**",
    ),
    check=checks.all_of(
        towers.known_setting("model_type", CLIP_TYPE, "siglip_vision_model"),
        _activation,
        _rows,
        towers.known_setting("num_channels", 3),
        towers.same_side("crop_size"),
        towers.same_side("size"),
        towers.known_of_model("projector_hidden_act", "gelu"),
    ),
)

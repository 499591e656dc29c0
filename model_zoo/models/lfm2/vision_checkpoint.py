"""LFM2-VL: conversion of vision checkpoints to GGUF."""

from dataclasses import replace
from math import isqrt
from typing import Any

from torch import Tensor

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.gguf_metadata import table_keys
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Conversion, Key, Rule
from model_zoo.gguf.metadata import Metadata
from model_zoo.images.normalise import STANDARD
from model_zoo.models.lfm2 import multimodal as lfm2
from model_zoo.models.lfm2.vision import EPS, MERGED

# Filters by their number in Pillow, which processors state.
_FILTERS = {each.value.value: name for name, each in lfm2.FILTERS.items()}
_PROCESSING: tuple[tuple[str, Any], ...] = (
    (lfm2.CUTS_KEY, True),
    (lfm2.THUMBNAIL_KEY, True),
    (lfm2.LEAST_TILES_KEY, lfm2.TILES[0]),
    (lfm2.MOST_TILES_KEY, lfm2.TILES[1]),
    (lfm2.TILE_KEY, lfm2.TILE),
    (lfm2.LEAST_ROWS_KEY, lfm2.ROWS[0]),
    (lfm2.MOST_ROWS_KEY, lfm2.ROWS[1]),
    (lfm2.TOLERANCE_KEY, lfm2.TOLERANCE),
)


def _processed(key: str, default: Any) -> Key:
    """A key with the name of the image processor's setting."""
    name = key.removeprefix("vision.")
    return Key(key, lambda c: towers.preprocessing(c).get(name, default), of=type(default))


def _merging(config: Configuration) -> int:
    return int(config.model.get("downsample_factor", MERGED))


def _layers(config: Configuration) -> int:
    """The number of layers up to the one that gives the features, which is the last stored one.
    First checkpoints count a further layer and state -2."""
    stated = config.model.get("vision_feature_layer", -1)
    layers = config.layers + int(stated) + 1
    if not 1 <= layers <= config.layers:
        raise config.error(
            f"takes features from the layer {stated}; one from -{config.layers} to -1 is needed"
        )
    return layers


def _side(config: Configuration) -> int:
    """The size in which the table of positions is not interpolated; readers need the key."""
    return isqrt(config.require_size("num_patches")) * config.require_size("patch_size")


def _filter(config: Configuration) -> str | None:
    stated = towers.preprocessing(config).get("resample")
    if stated is not None and stated not in _FILTERS:
        raise config.error(f"has an image processor with `resample` {stated}, which is not known")
    return None if stated is None else _FILTERS[stated]


def _as_convolution(config: Configuration, weight: Tensor) -> Tensor:
    """[hidden, rows * columns * channels] -> [hidden, channels, rows, columns]"""
    side = config.require_size("patch_size")
    return weight.view(len(weight), side, side, -1).permute(0, 3, 1, 2)


def _same_units(config: Configuration) -> None:
    """The image processor must count in the patches of the model."""
    stated = towers.preprocessing(config)
    for name, own in (
        ("encoder_patch_size", config.require_size("patch_size")),
        ("downsample_factor", _merging(config)),
    ):
        if stated.get(name, own) != own:
            raise config.error(
                f"has an image processor with {stated[name]} as `{name}`, but the model has {own}"
            )


def _readable(config: Configuration) -> None:
    """The limits of the reader, which would refuse the file."""
    keys = table_keys(VISION, config, flavour=LLAMA_CPP)
    stated = {"general.architecture": "clip", **keys}
    lfm2.read_processor(Metadata(stated, path=config.path))


def _has_norm(config: Configuration) -> bool:
    return bool(config.model.get("projector_use_layernorm", True))


VISION = Conversion(
    serves=("Lfm2VlForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip", OLLAMA: "lfm2"},
    keys=(
        *(key for key in towers.SIZES if key.name != "vision.block_count"),
        Key("vision.block_count", _layers),
        Key("vision.image_size", _side),
        *towers.clip("lfm2", STANDARD, eps="layer_norm_eps"),
        Key("use_gelu", lambda c: True, flavours=(LLAMA_CPP,)),
        towers.epsilon("layer_norm_eps", OLLAMA),
        *towers.colours(STANDARD, OLLAMA),
        Key("vision.num_channels", "num_channels", flavours=(OLLAMA,)),
        Key("vision.projector.use_layernorm", _has_norm, flavours=(OLLAMA,)),
        Key(lfm2.MERGE_KEY, _merging),
        *(_processed(*setting) for setting in _PROCESSING),
        Key(lfm2.RESAMPLE_KEY, _filter),
    ),
    rules=(
        Rule("embeddings.patch_embedding.weight", "v.patch_embd.weight", _as_convolution),
        Rule("embeddings.patch_embedding.bias", "v.patch_embd.bias"),
        Rule("embeddings.position_embedding.weight", "v.position_embd.weight"),
        *(
            replace(rule, only=lambda c, layer: layer < _layers(c))
            for rule in towers.layers("encoder.layers.{n}", towers.CLIP_MODULES)
        ),
        Rule("post_layernorm.*", "v.post_ln.*"),
        *(
            Rule(
                "multi_modal_projector.layer_norm.*",
                f"mm.{name}.*",
                only=lambda c, _: _has_norm(c),
                flavours=(flavour,),
            )
            for flavour, name in ((LLAMA_CPP, "input_norm"), (OLLAMA, "layer_norm"))
        ),
        Rule("multi_modal_projector.linear_1.*", "mm.1.*"),
        Rule("multi_modal_projector.linear_2.*", "mm.2.*"),
    ),
    roots=towers.roots("vision_tower.vision_model", "vision_tower"),
    drop=(*towers.TEXT, "head.**"),
    defaults={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "num_patches": 256,
        "patch_size": 16,
        "layer_norm_eps": EPS,
    },
    check=checks.all_of(
        towers.known_setting("hidden_act", "gelu_pytorch_tanh"),
        towers.known_setting("num_channels", 3),
        towers.known_of_model("projector_hidden_act", "gelu"),
        towers.known_of_model("use_image_special_tokens", True),
        _same_units,
        _readable,
    ),
)

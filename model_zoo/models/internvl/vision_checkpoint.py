"""InternVL: conversion of vision checkpoints to GGUF."""

from torch import Tensor

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.images.normalise import IMAGENET
from model_zoo.models.internvl.vision import EPS, MOST_TILES, SHUFFLED
from model_zoo.multimodal.image_settings import LEAST_TILES_KEY, MOST_TILES_KEY


def _side(name: str) -> Key:
    return Key(f"vision.{name}", lambda c: _of_square(c, name))


def _of_square(config: Configuration, name: str) -> int:
    stated = config.require(name)
    height, width = stated if isinstance(stated, list) else (stated, stated)
    if height != width:
        raise config.error(f"has {stated} as `{name}`, no square")
    return int(height)


def _shuffle(config: Configuration) -> int:
    return round(1 / float(config.model.get("downsample_ratio", 1 / SHUFFLED)))


def _position_rows(config: Configuration, table: Tensor) -> Tensor:
    return table.flatten(0, -2)


def _class(config: Configuration, token: Tensor) -> Tensor:
    return token.flatten()


_MODULES = (
    ("layernorm_before", "ln1"),
    ("attention.q_proj", "attn_q"),
    ("attention.k_proj", "attn_k"),
    ("attention.v_proj", "attn_v"),
    ("attention.projection_layer", "attn_out"),
    ("layernorm_after", "ln2"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
)


VISION = Conversion(
    serves=("InternVLForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip"},
    keys=(
        *(key for key in towers.SIZES if key.name != "vision.patch_size"),
        _side("patch_size"),
        _side("image_size"),
        *towers.clip("internvl", IMAGENET, eps="layer_norm_eps"),
        Key("use_gelu", lambda c: True),
        Key("vision.projector.scale_factor", _shuffle),
        Key(LEAST_TILES_KEY, lambda c: towers.preprocessing(c).get("min_patches", 1)),
        Key(MOST_TILES_KEY, lambda c: towers.preprocessing(c).get("max_patches", MOST_TILES)),
    ),
    rules=(
        Rule("embeddings.patch_embeddings.projection.*", "v.patch_embd.*"),
        Rule("embeddings.cls_token", "v.class_embd", _class, keep=True),
        Rule("embeddings.position_embeddings", "v.position_embd.weight", _position_rows),
        *towers.layers("encoder.layer.{n}", _MODULES),
        *(
            Rule(
                f"encoder.layer.{{n}}.attention.{part}_norm.weight",
                f"v.blk.{{n}}.attn_{part}_norm.weight",
                optional=True,
            )
            for part in "qk"
        ),
        *(
            Rule(f"encoder.layer.{{n}}.lambda_{part}", f"v.blk.{{n}}.ls{part}.weight")
            for part in (1, 2)
        ),
        Rule("layernorm.*", "v.post_ln.*", optional=True),
        Rule("multi_modal_projector.layer_norm.*", "mm.model.mlp.0.*"),
        Rule("multi_modal_projector.linear_1.*", "mm.model.mlp.1.*"),
        Rule("multi_modal_projector.linear_2.*", "mm.model.mlp.3.*"),
    ),
    roots=towers.roots("vision_tower"),
    drop=towers.TEXT,
    defaults={"patch_size": 14, "image_size": 448, "layer_norm_eps": EPS},
    check=checks.all_of(
        towers.known_setting("hidden_act", "gelu"),
        towers.known_setting("num_channels", 3),
        towers.known_setting("use_absolute_position_embeddings", True),
        towers.same_side("size"),
        towers.known_of_model("projector_hidden_act", "gelu"),
        towers.known_of_model("vision_feature_layer", -1),
        towers.known_of_model("vision_feature_select_strategy", "default"),
    ),
)

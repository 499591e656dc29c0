"""MiniCPM-V 4.6: conversion of vision checkpoints to GGUF."""

from typing import Any

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.images.normalise import STANDARD
from model_zoo.models.minicpmv.multimodal import MERGED
from model_zoo.models.minicpmv.vision_v4_6 import EPS, LAYER_KEY, MERGE, SQUARE, SQUARE_KEY

# Of the image processor, where a checkpoint is silent.
SIDE, LAYER = 448, 6


def _side(config: Configuration) -> int:
    """The side of a square with about the area of a part. The vision model's `image_size` is that
    of its table of positions."""
    return int(towers.preprocessing(config).get("scale_resolution", SIDE))


def _merging_layer(config: Configuration) -> list[int]:
    layer: Any = config.model.get("insert_layer_id")
    return [int(LAYER if layer is None else layer)]


VISION = Conversion(
    serves=("MiniCPMV4_6ForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip"},
    keys=(
        *towers.SIZES,
        Key("vision.image_size", _side),
        Key(SQUARE_KEY, lambda c: SQUARE),
        Key(LAYER_KEY, _merging_layer),
        *towers.clip(MERGED, STANDARD, eps="layer_norm_eps"),
        Key("use_gelu", lambda c: True),
    ),
    rules=(
        Rule("embeddings.patch_embedding.*", "v.patch_embd.*"),
        Rule("embeddings.position_embedding.weight", "v.position_embd.weight"),
        *towers.layers("encoder.layers.{n}", towers.CLIP_MODULES),
        Rule("post_layernorm.*", "v.post_ln.*"),
        Rule("vit_merger.layer_norm1.*", "v.vit_merger.ln1.*"),
        *(
            Rule(f"vit_merger.self_attn.{source}_proj.*", f"v.vit_merger.attn_{source}.*")
            for source in ("q", "k", "v", "out")
        ),
        Rule("vit_merger.pre_norm.*", "v.vit_merger.ds_ln.*"),
        Rule("vit_merger.linear_1.*", "v.vit_merger.ds_ffn_up.*"),
        Rule("vit_merger.linear_2.*", "v.vit_merger.ds_ffn_down.*"),
        Rule("merger.mlp.0.pre_norm.*", "mm.input_norm.*"),
        Rule("merger.mlp.0.linear_1.*", "mm.up.*"),
        Rule("merger.mlp.0.linear_2.*", "mm.down.*"),
    ),
    roots=towers.roots("vision_tower"),
    drop=(*towers.TEXT, "mtp.**"),
    defaults={"layer_norm_eps": EPS, "patch_size": 14},
    check=checks.all_of(
        towers.known_setting("hidden_act", "gelu_pytorch_tanh"),
        towers.known_setting("num_channels", 3),
        towers.known_setting("window_kernel_size", [MERGE, MERGE]),
        towers.known_of_model("merge_kernel_size", [MERGE, MERGE]),
        towers.known_of_model("merger_times", 1),
        towers.known_of_model("downsample_mode", "16x"),
        towers.known_of_model("drop_vision_last_layer", False),
        towers.known_processing("downsample_mode", "16x"),
        towers.known_processing("max_slice_nums", 9),
        towers.known_processing("slice_mode", True),
    ),
)

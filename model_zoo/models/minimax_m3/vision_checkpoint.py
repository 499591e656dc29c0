"""MiniMax M3: conversion of vision checkpoints to GGUF."""

import torch
from torch import Tensor

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.images.normalise import CLIP
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.layers.vision.vision_sizes import MERGED
from model_zoo.models.minimax_m3.vision import EPS, FILE_FRAMES, FRAMES, pairs_of_an_axis

_TOWER = "vision_tower.vision_model"
_TURNED = ("attn_q", "attn_k")


def _axes_apart(config: Configuration, rows: Tensor) -> Tensor:
    """Rows of queries or keys, or their biases: in checkpoints, the first elements of all pairs of
    a head precede the second ones; in files, the pairs of each axis are consecutive."""
    heads = config.require_size("num_attention_heads")
    each = pairs_of_an_axis(len(rows) // heads)
    axes = torch.arange(6 * each).view(2, 3, each).transpose(0, 1).flatten()
    order = torch.cat([axes, torch.arange(6 * each, len(rows) // heads)])
    return rows.unflatten(0, (heads, -1))[:, order].flatten(0, 1)


def _module_rules() -> tuple[Rule, ...]:
    return tuple(
        Rule(
            f"{_TOWER}.encoder.layers.{{n}}.{module}.*",
            f"v.blk.{{n}}.{name}.*",
            _axes_apart if name in _TURNED else None,
        )
        for module, name in towers.CLIP_MODULES
    )


VISION = Conversion(
    serves=("MiniMaxM3SparseForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip"},
    keys=(
        *towers.SIZES,
        towers.IMAGE_SIZE,
        Key("vision.spatial_merge_size", "spatial_merge_size"),
        *towers.clip("minimax_m3", CLIP, eps="layer_norm_eps"),
        Key("use_gelu", lambda c: True),
        Key("vision.image_max_pixels", towers.most_pixels),
        Key("vision.image_min_pixels", towers.least_pixels),
    ),
    rules=(
        *(
            Rule(f"{_TOWER}.embeddings.patch_embedding.weight", f"v.{name}", towers.frame(index))
            for index, name in enumerate(FILE_FRAMES)
        ),
        Rule(f"{_TOWER}.pre_layrnorm.*", "v.pre_ln.*"),
        *_module_rules(),
        *(Rule(f"multi_modal_projector.linear_{n}.*", f"mm.{n}.*") for n in (1, 2)),
        *(Rule(f"patch_merge_mlp.linear_{n}.*", f"mm.merger.fc{n}.*") for n in (1, 2)),
    ),
    roots=("model.",),
    drop=(*towers.TEXT, "mtp.**"),
    defaults={
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "image_size": 2016,
        "patch_size": 14,
        "spatial_merge_size": MERGED,
        "layer_norm_eps": EPS,
    },
    check=checks.all_of(
        towers.known_setting("hidden_act", "gelu"),
        towers.known_setting("num_channels", 3),
        towers.known_setting("temporal_patch_size", FRAMES),
        towers.known_rope_base(DEFAULT_BASE),
    ),
)

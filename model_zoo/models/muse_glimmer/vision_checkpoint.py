"""Muse Glimmer: conversion of vision checkpoints to GGUF."""

from torch import Tensor

from model_zoo.convert import checks, towers
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import LLAMA_CPP, Conversion, Key, Rule
from model_zoo.convert.transforms import interleaved
from model_zoo.images.normalise import STANDARD
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.layers.vision.vision_sizes import CHANNELS, MERGED
from model_zoo.models.muse_glimmer.image_processor import MOST_ROWS
from model_zoo.models.muse_glimmer.vision import EPS, FULL_EVERY
from runtime.errors import UnsupportedModelError


def _image_side(config: Configuration) -> int:
    """Readers divide it by the side of a merged patch for the side of the position table."""
    sizes = ("pos_emb_height", "patch_size", "merge_size")
    cells, patch, merge = (config.require_size(name) for name in sizes)
    return cells * patch * merge


def _one_frame(config: Configuration, weight: Tensor) -> Tensor:
    """[out, frames * channels * side * side] -> [out, channels, side, side], the sum of frames."""
    side, frames = config.require_size("patch_size"), config.require_size("patch_temporal")
    return weight.float().view(len(weight), frames, CHANNELS, side, side).sum(1)


def _usual_windows(config: Configuration) -> None:
    listed, layers = config.get("layer_types"), config.layers
    usual = [
        "full_attention" if (layer + 1) % FULL_EVERY == 0 or layer == layers - 1
        else "window_attention"
        for layer in range(layers)
    ]  # fmt: skip
    if listed is not None and listed != usual:
        raise UnsupportedModelError(
            f"{config.path}: `layer_types` of the vision part must have a window in all layers but "
            f"one in {FULL_EVERY} and the last."
        )


VISION = Conversion(
    serves=("MuseGlimmerForConditionalGeneration",),
    architecture={LLAMA_CPP: "clip"},
    keys=(
        *towers.SIZES,
        Key("vision.image_size", _image_side),
        Key("vision.spatial_merge_size", "merge_size"),
        *towers.clip("muse-glimmer", STANDARD, eps=EPS),
        Key("use_gelu", lambda c: True),
    ),
    rules=(
        Rule("patch_embedder.patch_embedding.weight", "v.patch_embd.weight", _one_frame),
        Rule("patch_embedder.position_embedding_table.weight", "v.position_embd.weight"),
        Rule("ln_pre.*", "v.pre_ln.*"),
        Rule("ln_post.*", "v.post_ln.*"),
        *(
            Rule(
                f"layers.{{n}}.attn.{part}_proj.*",
                f"v.blk.{{n}}.attn_{part}.*",
                interleaved("num_attention_heads") if part != "v" else None,
            )
            for part in "qkv"
        ),
        *towers.layers(
            "layers.{n}",
            (
                ("norm1", "ln1"),
                ("attn.proj", "attn_out"),
                ("norm2", "ln2"),
                ("mlp.fc1", "ffn_up"),
                ("mlp.fc2", "ffn_down"),
            ),
        ),
        Rule("vision_adapter.fc1.weight", "mm.0.weight"),
        Rule("vision_adapter.fc2.weight", "mm.1.weight"),
        Rule("vision_projection.weight", "mm.2.weight"),
    ),
    roots=towers.roots("vision_tower"),
    drop=("language_model.**", "lm_head.**"),
    defaults={
        "num_hidden_layers": 50,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 16,
        "patch_size": 14,
        "pos_emb_height": 32,
        "pos_emb_width": 32,
        "patch_temporal": 2,
        "merge_size": MERGED,
    },
    check=checks.all_of(
        towers.known_setting("hidden_act", "gelu"),
        towers.known_setting("layer_norm_eps", EPS),
        towers.known_rope_base(DEFAULT_BASE),
        towers.known_of_model("projector_hidden_act", "gelu"),
        towers.known_processing("max_image_tokens", MOST_ROWS),
        _usual_windows,
    ),
)
